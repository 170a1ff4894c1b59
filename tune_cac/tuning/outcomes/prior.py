"""Outcomes of earlier studies, in features that models and lengths of a run have in common.

A stop is told by its share of the full run and by its depth, the share of the backward pass's FLOPs that it spares; a
loss in units of what the new run's allowed drop is on the study's own baseline. So runs of another model are
observations of the same function.

Shapes: k layers of the new run, ascending by depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.predicted import trains_after
from analysis.trace_replay.traces import RunTrace
from trainables.errors import UserError
from trainables.savings import share_saved


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
    """Of quality against its study's baseline, in units of the new run's allowed drop on that baseline."""


@dataclass(frozen=True, kw_only=True)
class PriorStudy:
    """The runs of an earlier study."""

    study: str
    """Its name."""
    runs: tuple[PriorRun, ...]
    """All that ended but the baseline."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PriorStudy:
        """Build from plain types, as `dataclasses.asdict` and JSON give them."""
        runs = [PriorRun(**{**run, "stops": tuple(map(tuple, run["stops"]))}) for run in values["runs"]]
        return cls(study=values["study"], runs=tuple(runs))

    def best(self) -> PriorRun | None:
        """Return the run within the allowed loss that saves most; None if none saves anything."""
        within = [run for run in self.runs if run.loss <= 1 + 1e-9 and run.saved > 0]
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
        self._known = sorted(found.items())

    @property
    def levels(self) -> list[float]:
        """Return the depths of its layers, ascending."""
        return sorted({depth for _, depth in self._known})

    def of(self, number: int) -> float:
        """Return the depth of a stop through a parameter; that of the last known layer before it if it is none."""
        return max((depth for known, depth in self._known if known <= number), default=0.0)

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
    """Return features (n, k + 2), losses in allowed ones (n,) and study's number from 1 on (n,) of all earlier runs.

    Args:
        priors: the studies.
        depths: of the new run's layers, ascending.
    """
    runs = [(number, run) for number, prior in enumerate(priors, 1) for run in prior.runs]
    return (
        features_of([run for _, run in runs], depths),
        np.array([run.loss for _, run in runs], float),
        np.array([number for number, _ in runs], int),
    )


def first_length(priors: Sequence[PriorStudy], epochs: int) -> int | None:
    """Return the epochs, of a full run's, that the best runs of earlier studies trained; None if they trained all.

    Args:
        priors: the studies, of which the mean counts.
        epochs: of the full run.
    """
    shares = [best.ended for prior in priors if (best := prior.best()) is not None]
    found = round(float(np.mean(shares)) * epochs) if shares else epochs
    return max(1, found) if found < epochs else None
