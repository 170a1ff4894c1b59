"""Distinct outcomes of a space's settings: which layers stop when, as replay on recorded runs predicts it.

Settings with one outcome train alike, bit for bit, so only one of them is trained: the one nearest to the middle of the
region that the others fill, which `outcome_queue.at_middle` then moves to the exact middle. A run of fewer epochs has
outcomes of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.noise import resolution_of, seed_noise
from analysis.trace_replay.traces import RunTrace, trains_after
from trainables.errors import UserError
from trainables.gradskip.variables import BY_NAME
from trainables.quality import Quality, allowed_amount
from trainables.savings import share_saved
from tune_cac.tuning.outcomes.run_lengths import EPOCHS
from tune_cac.tuning.warm_start.baseline import WarmStart, outcome, predictions

# --- Features by which the model of the quality knows a run: savings, length, how long each part of the network ---
# trained
# A stop is told by its share of the full run and by its depth, the share of the backward pass's FLOPs that it spares.
#
# Shapes: k layers of the run, ascending by depth.


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


def features_of(
    stops: Iterable[tuple[float, float]], depths: Sequence[float], *, end: float, saved: float
) -> NDArray[np.float64]:
    """Return (k + 2,) features by which `quality_model` knows a run.

    Args:
        stops: (share of the full run, depth) of each stop.
        depths: at which the layers end, ascending.
        end: share of the full run at which the run ends.
        saved: compute saved, a fraction of that of the full run.
    """
    return np.array([saved, end, *shares_at(stops, depths, end=end)])


# --- Distinct outcomes of a space's settings --------------------------------------------------------------------------

#: Parameters of a setting, and the fields of its configuration.
Drawn = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Effect of a group of settings on training."""

    parameters: Mapping[str, Any]
    """Optuna parameters of the setting nearest to the middle of the group."""
    config: Mapping[str, Any]
    """Fields of that setting's configuration."""
    epochs: int
    """Epochs of the run."""
    share: float
    """Its steps over those of the full run."""
    saved: float
    """Compute saved, a fraction of that of the full run."""
    stops: tuple[tuple[int, int], ...]
    """(iteration, position of the last parameter stopped) of each stop."""
    identity: str
    """Text that is equal for settings that train alike in a run of this length: stops, braking, ..."""
    known: bool
    """True if the whole run was trained before."""
    group: tuple[Drawn, ...]
    """Settings that train alike by the dense run, this one among them; once others are recorded they may not."""


def distinct_outcomes(
    known: WarmStart, drawn: Sequence[Drawn], *, share: float = 1.0
) -> tuple[list[Outcome], list[Drawn]]:
    """Group settings that train alike by a dense run; those that do nothing are left out.

    Args:
        known: what was learned from that run, with the costs of what the settings stop.
        drawn: settings of its space.
        share: steps of the run over those of the full one.

    Returns:
        The outcomes, by ascending savings, and the settings that cannot be predicted, as their rules measure what was
        not recorded.
    """
    groups: dict[str, list[int]] = {}
    predicted = predictions(known.trace, [values for _, values in drawn])
    for row, found in enumerate(predicted):
        if found is not None and found["stops"] > 0 and found["compute_saved"] > 0:  # a stop may brake to the run's end
            groups.setdefault(outcome(found, drawn[row][1]), []).append(row)
    made = []
    for rows in groups.values():
        group = tuple(drawn[row] for row in rows)
        place = middle_of([parameters for parameters, _ in group])
        parameters, config = group[place]
        facts = facts_of(predicted[rows[place]] or {}, config, share)
        made.append(
            Outcome(parameters=parameters, config=config, epochs=known.base.epochs, share=share, group=group, **facts)
        )
    unpredicted = [setting for setting, found in zip(drawn, predicted, strict=True) if found is None]
    return sorted(made, key=lambda one: one.saved), unpredicted


def predicted_again(outcomes: Sequence[Outcome], trace: RunTrace) -> list[Outcome]:
    """Return the outcomes as all recorded runs predict them: groups that do not train alike parted, equal ones once.

    Args:
        outcomes: of groups of settings, as the dense run predicts them.
        trace: all recorded runs of the study.
    """
    found: list[Outcome] = []
    for one, row in zip(outcomes, predictions(trace, [one.config for one in outcomes], branches=True), strict=True):
        if row is None:
            found.append(one)
        elif row["stage"] == trace.root or len(one.group) == 1:  # nothing but the dense run was read
            found.append(replace(one, **facts_of(row, one.config, one.share)))
        else:
            found += _parted(one, row, trace)
    return list({one.identity: one for one in reversed(found)}.values())[::-1]


def _parted(one: Outcome, row: Mapping[str, Any], trace: RunTrace) -> list[Outcome]:
    """Return the outcomes of one group: that of its own setting, and those of settings that train otherwise."""
    rows = predictions(trace, [config for _, config in one.group], branches=True)
    parts: dict[str, list[int]] = {outcome(row, one.config): []}
    for place, (found, (_, config)) in enumerate(zip(rows, one.group, strict=True)):
        if found is not None:
            parts.setdefault(outcome(found, config), []).append(place)
    _, *others = parts.items()
    made = [replace(one, **facts_of(row, one.config, one.share))]
    for _, places in others:
        place = places[middle_of([one.group[place][0] for place in places])]
        parameters, config = one.group[place]
        facts = facts_of(rows[place] or {}, config, one.share)
        made.append(replace(one, parameters=parameters, config=config, **facts))
    return made


def is_predicted(values: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether a setting differs from the baseline by what replay follows alone, and saves as it predicts."""
    others = {name: value for name, value in values.items() if name not in BY_NAME and name not in ("method", EPOCHS)}
    same = all(base.get(name) == value for name, value in others.items() if value)  # a forward cache saves more
    return same and bool(values.get("CAC_PREFIX_AUTOGRAD", True))


def facts_of(row: Mapping[str, Any], config: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the fields of an outcome that are predicted.

    Args:
        row: of `predictions`.
        config: fields of the setting's configuration.
        share: steps of its run over those of the full run.
    """
    return {
        "identity": outcome(row, config),
        "saved": 1 - share * (1 - float(row["compute_saved"])),
        "stops": stops_in(row),
        "known": bool(row["exact"]),
    }


def stops_in(row: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return (iteration, position of the last parameter stopped) of each stop of a trial's or a predicted row."""
    return tuple((event["iteration"], event["layer"]) for event in json.loads(row.get("stop_events") or "[]"))


def identity_in(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return `Outcome.identity` of a trial, given its row and its configuration."""
    return outcome({"stop_events": row.get("stop_events") or "[]"}, config)


def region_of(group: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest value of each numeric parameter that all settings of a group have.

    >>> region_of([{"thr": 0.93, "rule": "a"}, {"thr": 0.96, "rule": "a"}])
    {'thr': (0.93, 0.96)}
    """
    names = [name for name in group[0] if all(_is_number(setting.get(name)) for setting in group)]
    return {name: (min(s[name] for s in group), max(s[name] for s in group)) for name in names}


def middle_of(group: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the setting whose numeric parameters are nearest to the middle of the group's region.

    >>> middle_of([{"thr": 0.90}, {"thr": 0.94}, {"thr": 1.0}])
    1
    """
    region = region_of(group)
    distances = [
        sum(((s[name] - (low + high) / 2) / (high - low)) ** 2 for name, (low, high) in region.items() if high > low)
        for s in group
    ]
    return int(np.argmin(distances))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shared_steps(
    stops: Sequence[tuple[int, int]], others: Iterable[Sequence[tuple[int, int]]], total_steps: int
) -> int:
    """Return the steps, from the start, that an outcome trains as another one did: until the first different stop.

    >>> shared_steps([(10, 2), (50, 5)], [(), [(10, 2), (40, 5)]], 100)
    40

    Args:
        stops: (iteration, position) of each stop of the outcome.
        others: stops of the outcomes that were trained.
        total_steps: of the run.
    """
    most = 0
    for other in others:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stops, other, strict=False)))
        most = max(most, min((when for when, _ in (*stops[same:], *other[same:])), default=total_steps))
    return most


# --- Scale of losses of quality: what may be lost, what can be told apart, and how far the luck of one seed goes

#: The unit of losses is at least this share of one run's luck, or of the baseline's value where that is not known: an
#: allowed loss far below tells nothing of how large losses are.
_SHARE_OF_LUCK, _SHARE_OF_VALUE = 0.5, 0.001
#: The least unit.
_LEAST = 1e-12


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Losses on one split against one baseline, in the metric's unit."""

    allowed: float
    """Loss that is allowed."""
    limit: float
    """Smooth loss up to which a run counts as within it (`limit_between_counts`)."""
    luck: float
    """Standard deviation of a run's quality over seeds; `unit` where that is not known."""
    unit: float
    """Usual loss, which the model of the quality counts in: the allowed one, unless that is too small; > 0."""

    @property
    def within(self) -> float:
        """Return the loss up to which a smooth loss on another seed counts as within the allowed one.

        That is the limit where half a sample more than may be lost is above the allowed loss. Below it the allowed loss
        is: what was measured on fresh seeds held more often than it was said to (docs/findings.md).
        """
        return max(self.allowed, self.limit)

    @property
    def luck_in_units(self) -> float:
        """Return the luck in units."""
        return self.luck / self.unit


def loss_scale(baseline: float, others: Sequence[float], quality: Quality, allowed_drop: float | str) -> LossScale:
    """Return the scale of losses against a baseline.

    Args:
        baseline: its quality.
        others: that of other runs, to infer how many samples it is measured on.
        quality: the metric, of which accuracy alone has a known deviation (`analysis.metrics.noise`).
        allowed_drop: that may be lost of it (`trainables.quality`).
    """
    allowed, values = float(allowed_amount(allowed_drop, baseline)), [baseline, *others]
    luck = 0.0
    if quality.is_accuracy:
        luck = float(seed_noise(baseline, resolution_of(pd.Series(values)))) / math.sqrt(2)  # of one run, not of two
    unit = max(allowed, _SHARE_OF_LUCK * luck or _SHARE_OF_VALUE * abs(baseline), _LEAST)
    limit = limit_between_counts(allowed, values, quality)
    return LossScale(allowed=allowed, limit=limit, luck=luck or unit, unit=unit)


def limit_between_counts(allowed: float, values: Sequence[float], quality: Quality) -> float:
    """Return the limit up to which a smooth loss counts as within the allowed one (continuity correction).

    Of 599 samples two may be lost at an allowed loss of 0.005 and three may not, so what is expected to lose three is
    not about half within; and where none may be lost, what is expected to lose none is within.

    >>> from trainables.quality import ACCURACY
    >>> round(599 * limit_between_counts(0.005, [583 / 599, 590 / 599], ACCURACY), 9)
    2.5

    Args:
        allowed: loss.
        values: the quality of runs, to infer how many samples it is measured on.
        quality: the metric; of others than accuracy all losses can be told apart.
    """
    one = resolution_of(pd.Series(list(values))) if quality.is_accuracy else None
    return allowed if one is None else (math.floor(allowed / one + 1e-9) + 0.5) * one
