"""Outcomes of earlier studies, in features that models and lengths of a run have in common.

A stop is told by its share of the full run and by its depth, the share of the backward pass's FLOPs that it spares; a
loss in units of the scale that the new run's allowed drop has on the study's own baseline (`seed_luck.LossScale`). So
runs of another model are observations of the same function.

Shapes: k layers of the new run, ascending by depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.predicted import trains_after
from analysis.trace_replay.traces import RunTrace
from trainables.errors import UserError
from trainables.quality import Quality
from trainables.savings import share_saved
from tune_cac.tuning.outcomes.seed_luck import LossScale, loss_scale


@dataclass(frozen=True, kw_only=True)
class PriorRun:
    """A run that an earlier study trained."""

    stops: tuple[tuple[float, float], ...]
    """(share of the full run, depth in 0..1) of each stop."""
    ended: float
    """Share of the full run at which it ended."""
    saved: float
    """Compute saved, a fraction of that of the full run."""
    loss: float
    """Of quality against its study's baseline, in the metric's unit."""


@dataclass(frozen=True, kw_only=True)
class PriorStudy:
    """The runs of an earlier study."""

    study: str
    """Its name."""
    runs: tuple[PriorRun, ...]
    """All that ended but the baseline."""
    baseline: float
    """Quality of its baseline."""
    scale: LossScale
    """That of its losses."""

    @classmethod
    def of(
        cls, study: str, runs: Sequence[PriorRun], baseline: float, quality: Quality, allowed_drop: float | str
    ) -> PriorStudy:
        """Return the runs of a study as one with this metric and allowed drop (`trainables.quality`) sees them."""
        others = [baseline - quality.sign * run.loss for run in runs]
        scale = loss_scale(baseline, others, quality, allowed_drop)
        return cls(study=study, runs=tuple(runs), baseline=baseline, scale=scale)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], quality: Quality, allowed_drop: float | str) -> PriorStudy:
        """Build it from the result of `to_dict`, also after a conversion to JSON and back."""
        runs = [PriorRun(**{**run, "stops": tuple(map(tuple, run["stops"]))}) for run in values["runs"]]
        return cls.of(values["study"], runs, values["baseline"], quality, allowed_drop)

    def to_dict(self) -> dict[str, Any]:
        """Return it in plain types, without the scale, which a search that goes on may change."""
        return {"study": self.study, "baseline": self.baseline, "runs": [asdict(run) for run in self.runs]}

    def best(self) -> PriorRun | None:
        """Return the run within the allowed loss that saves most; None if none saves anything."""
        within = [run for run in self.runs if run.loss <= self.scale.allowed + 1e-9 and run.saved > 0]
        return max(within, key=lambda run: run.saved, default=None)


class Depths:
    """Share of a model's backward FLOPs that stops through its layers spare.

    Args:
        trace: recorded training of the model, with the costs of its units' stops.
    """

    def __init__(self, trace: RunTrace) -> None:
        _, whole = trace.costs_of(trace.trains).before(trace.steps_per_epoch)
        found: dict[int, float] = {}
        for blueprint in trace.facts.values():
            for unit in blueprint.plan.units[: blueprint.stoppable]:
                try:
                    left = trace.costs_of(trains_after(trace, blueprint, unit.end)).before(trace.steps_per_epoch)[1]
                except UserError:  # a plan whose settings were never drawn
                    continue
                # An event of auto mode names the layer's weight, one of manual mode the last parameter.
                found[unit.number] = found[blueprint.plan.order[unit.end]] = float(share_saved(left, whole))
        self._known = found
        self._plans = [blueprint.plan for blueprint in trace.facts.values()]

    @property
    def levels(self) -> list[float]:
        """Return the depths of its layers, ascending."""
        return sorted(set(self._known.values()))

    def of(self, number: int) -> float:
        """Return the depth of a stop through a parameter; that of the last layer that stops with it if it is none."""
        if number in self._known:
            return self._known[number]
        plan = next((plan for plan in self._plans if number in plan.order), None)
        stopped = () if plan is None else plan.order[: plan.position_of_stop(number) + 1]
        return max((self._known[one] for one in stopped if one in self._known), default=0.0)

    def of_stops(self, stops: Iterable[tuple[int, int]], total_steps: int) -> tuple[tuple[float, float], ...]:
        """Return (share of the full run, depth) of each stop.

        Args:
            stops: (iteration, parameter) of each.
            total_steps: of the full run.
        """
        return tuple((when / total_steps, self.of(number)) for when, number in stops)


def shares_at(stops: Iterable[tuple[float, float]], depths: Sequence[float], *, end: float) -> NDArray[np.float64]:
    """Return (k,) shares of the full run that layers trained, each a mean over the depths that the layer takes up.

    >>> shares_at([(0.1, 0.3), (0.5, 0.6)], [0.2, 0.4, 0.8], end=1.0).round(9).tolist()
    [0.1, 0.3, 0.75]

    Args:
        stops: (share of the full run, depth) of each stop.
        depths: at which the layers end, ascending.
        end: share of the full run at which the run ends.
    """
    stops = list(stops)

    def trained(depth: float) -> float:
        return min((when for when, through in stops if through >= depth - 1e-9), default=end)

    found = []
    for low, high in pairwise([0.0, *depths]):
        if high - low < 1e-9:
            found.append(trained(high))
            continue
        cuts = sorted({low, high, *(through for _, through in stops if low < through < high)})
        found.append(sum((b - a) * trained(b) for a, b in pairwise(cuts)) / (high - low))
    return np.array(found)


def features_of(runs: Sequence[PriorRun], depths: Sequence[float]) -> NDArray[np.float64]:
    """Return (n, k + 2) features by which `quality_model` knows runs.

    Args:
        runs: n of them.
        depths: of the new run's layers, ascending.
    """
    rows = [[run.saved, run.ended, *shares_at(run.stops, depths, end=run.ended)] for run in runs]
    return np.array(rows, float).reshape(len(runs), len(depths) + 2)


def prior_rows(
    priors: Sequence[PriorStudy], depths: Sequence[float]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return features (n, k + 2), losses in their scales' units (n,) and study's number from 1 on (n,) of all runs.

    Args:
        priors: the studies.
        depths: of the new run's layers, ascending.
    """
    return (
        features_of([run for prior in priors for run in prior.runs], depths),
        np.array([run.loss / prior.scale.unit for prior in priors for run in prior.runs], float),
        np.array([number for number, prior in enumerate(priors, 1) for _ in prior.runs], int),
    )


def first_length(priors: Sequence[PriorStudy], epochs: int) -> int | None:
    """Return the epochs, of a full run's, that the best runs of earlier studies trained; None if they trained all.

    Args:
        priors: the studies, of which the mean counts.
        epochs: of the full run.
    """
    shares = [best.ended for prior in priors if (best := prior.best()) is not None]
    found = max(1, round(float(np.mean(shares)) * epochs)) if shares else epochs
    return found if found < epochs else None
