"""Batched replay of the variance rule (`trainables.gradskip.rules.published.AutoRule`) for many settings at once.

After a stop, settings differ only in their recorded stage, the iteration of the last decision, the earliest iteration
of the next one, their sampling interval, and their thresholds. Settings that differ only in thresholds read the same
values: one curve of ratios and peak updates over their due iterations serves all of them, and the stop of each
threshold is found in it by bisection. The outer loop runs over the layers, because each stop advances to the next one.

Symbols, as in `rules`: v variance, peak, count, ratio. Shapes: n settings, T steps, J due iterations of a curve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.predicted import Predicted, spared, trains_after
from analysis.trace_replay.settings import AutoNumbers
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.gradskip.layer_plan import Blueprint, Unit
from trainables.gradskip.replay import signal_name, stop_action
from trainables.gradskip.rules.stop_rule import Decision

_RULES = ("start", "mountain", "slope")
_START, _MOUNTAIN, _SLOPE = range(3)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values of one layer at the due iterations that a group of settings shares."""

    iterations: NDArray[np.int64]
    """(J,) due iterations, ascending."""
    ratios: NDArray[np.float64]
    """(J,) variance over peak, rounded as in the rule; infinite where no stop is possible (a new peak, a NaN)."""
    counts: NDArray[np.int64]
    """(J,) peak updates up to and including each due iteration."""


def curve(iterations: NDArray[np.int64], variances: NDArray[np.float64], *, single_precision: bool) -> Curve:
    """Compute the curve of a layer whose peak is reset at the first of the iterations."""
    before = np.fmax.accumulate(np.concatenate([np.zeros(1), variances]))[:-1]  # a NaN does not count as a peak
    updates = variances >= before
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = variances / before
    ratios = _rounded(ratios, single_precision)
    ratios[updates | ~(ratios < np.inf)] = np.inf
    return Curve(iterations=iterations, ratios=ratios, counts=np.cumsum(updates))


def _rounded(values: NDArray[np.float64], single_precision: bool) -> NDArray[np.float64]:
    if not single_precision:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def first_below(ratios: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the first ratio below each threshold; ``len(ratios)`` where there is none."""
    lowest = np.minimum.accumulate(ratios)
    return np.searchsorted(-lowest, -thresholds, side="right")


def first_fires(
    seen: Curve, mountain_count: NDArray[np.int64], mountain: NDArray[np.float64], slope: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find where each setting stops a later target, and by which rule.

    Returns:
        (m,) index in the curve, its length for no stop, and (m,) `_MOUNTAIN` or `_SLOPE`.
    """
    # The count never decreases, so a target is a slope up to some index and a mountain from there on.
    turns = np.searchsorted(seen.counts, mountain_count, side="right")
    places = first_below(seen.ratios, slope)
    rules = np.full(len(slope), _SLOPE)
    late = places >= turns
    for turn in np.unique(turns[late]):
        those = late & (turns == turn)
        places[those] = turn + first_below(seen.ratios[turn:], mountain[those])
        rules[those] = _MOUNTAIN
    return places, rules


class _LayerViews:
    """Variances of one layer for each stage: of its own run where recorded, else continued from its ancestors."""

    def __init__(self, trace: RunTrace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._known: dict[int | None, tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]] = {}

    def of(self, place: int | None) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return (T,) values, whether each is recorded in any stage, and whether in the stage's own run."""
        if place not in self._known:
            self._known[place] = self._view(place)
        return self._known[place]

    def _view(self, place: int | None) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        total = self._trace.total_steps
        if place is None:
            return np.full(total, np.nan), np.zeros(total, bool), np.zeros(total, bool)
        stage = self._trace.stages[place]
        values, known, own = (array.copy() for array in self.of(stage.parent))
        own[stage.start :] = False
        recorded, there = (array[: total - stage.start] for array in stage.signal(self._name))
        span = slice(stage.start, stage.start + len(recorded))
        values[span] = np.where(there, recorded, values[span])
        known[span] |= there
        own[span] = there
        return values, known, own


def replay_auto(trace: RunTrace, config: TrialConfig, numbers: AutoNumbers) -> Predicted:
    """Replay the variance rule for n settings.

    Args:
        trace: recorded training.
        config: the configuration without the numbers of the rule.
        numbers: the numbers of the rule for n settings.

    Raises:
        UserError: the study has not recorded the plan of layers or the costs for these settings.
    """
    blueprint = trace.blueprint(config)
    return _Replay(trace, config, blueprint, numbers).run()


class _Replay:
    def __init__(self, trace: RunTrace, config: TrialConfig, blueprint: Blueprint, numbers: AutoNumbers) -> None:
        self._trace = trace
        self._config = config
        self._settings = config.gradskip_settings()
        self._blueprint = blueprint
        self._single = blueprint.single_precision
        self._interval = numbers.interval
        self._braking = numbers.braking
        self._mountain_count = numbers.mt_count_thr
        self._start, self._mountain, self._slope = (
            _rounded(thresholds, self._single) for thresholds in (numbers.start_thr, numbers.mt_thr, numbers.slope_thr)
        )
        count = len(numbers.interval)
        self._found = Predicted.nothing(count, trace)
        self._anchor = np.full(count, -1, np.int64)  # iteration at which the current target became current
        self._due = -(-numbers.start_itr // self._interval) * self._interval  # next due iteration

    def run(self) -> Predicted:
        stopped = self._trace.trains
        for place, unit in enumerate(self._blueprint.plan.units[: self._blueprint.stoppable]):
            looking = np.flatnonzero((self._due < self._trace.total_steps) & ~self._found.unknown)
            if len(looking) == 0:
                break
            when, ratios, rules = self._look(looking, unit, first=place == 0)
            fired = when >= 0
            self._due[looking[~fired]] = self._trace.total_steps  # no further stops
            now_stopped = trains_after(self._trace, self._blueprint, unit.end)
            if fired.any():
                rows = looking[fired]
                self._stop(rows, unit, when[fired], stopped, now_stopped)
                self._note(rows, unit, when[fired], ratios[fired], rules[fired])
            stopped = now_stopped
        return self._found

    # --- finding stops ------------------------------------------------------------------------------------------------

    def _look(
        self, looking: NDArray[np.int64], unit: Unit, *, first: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return the iteration at which each setting stops this layer (-1 for never), the ratio and the rule."""
        views = _LayerViews(self._trace, signal_name(self._settings, unit.watched))
        when = np.full(len(looking), -1, np.int64)
        ratios, rules = np.full(len(looking), np.nan), np.full(len(looking), _START)
        for members in self._alike(looking):
            rows = looking[members]
            leader = rows[0]
            values, known, own = views.of(int(self._found.stage[leader]))
            looks = np.arange(self._due[leader], self._trace.total_steps, self._interval[leader])
            if not first:
                looks = np.concatenate([self._anchor[leader : leader + 1], looks])
            missing = _first(~known[looks])
            seen = curve(looks[:missing], values[looks[:missing]], single_precision=self._single)
            if first:
                places = first_below(seen.ratios, self._start[rows])
                rules[members] = _START
            else:
                places, rules[members] = first_fires(
                    seen, self._mountain_count[rows], self._mountain[rows], self._slope[rows]
                )
            fired = places < missing
            when[members[fired]] = looks[places[fired]]
            ratios[members[fired]] = seen.ratios[places[fired]]
            # Index 0 is the anchor, the last decision; its value was still of their own run for settings off it now.
            foreign = np.where(self._found.own[rows], _first(~own[looks]), 0 if first else 1)
            self._tell_certainty(rows, looks, foreign, places, missing)
        return when, ratios, rules

    def _tell_certainty(
        self,
        rows: NDArray[np.int64],
        looks: NDArray[np.int64],
        foreign: NDArray[np.int64],
        places: NDArray[np.int64],
        missing: int,
    ) -> None:
        found = self._found
        certain = np.append(looks, self._trace.total_steps)
        guessed = foreign <= np.minimum(places, len(looks) - 1)
        blind = (places >= missing) & (missing < len(looks))
        found.unknown[rows[blind]] = True
        doubtful = guessed | blind
        first = np.minimum(foreign, np.where(blind, missing, len(looks)))[doubtful]
        found.own[rows[doubtful]] = False
        found.certain_until[rows[doubtful]] = np.minimum(found.certain_until[rows[doubtful]], certain[first])

    def _alike(self, looking: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield indices into ``looking``, grouped by settings that read the same values."""
        keys = [array[looking] for array in (self._found.stage, self._anchor, self._due, self._interval)]
        order = np.lexsort(keys)
        changes = np.zeros(len(order), bool)
        for key in keys:
            changes[1:] |= key[order[1:]] != key[order[:-1]]
        yield from np.split(order, np.flatnonzero(changes))

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _stop(self, rows: NDArray[np.int64], unit: Unit, when: NDArray[np.int64], before: str, after: str) -> None:
        found, total = self._found, self._trace.total_steps
        next_step = when + np.maximum(self._braking[rows], 1)
        all_flops, backward = spared(self._trace, before, after, np.minimum(next_step, total))
        found.spared[rows] += all_flops
        found.spared_backward[rows] += backward
        found.stops[rows] += 1
        found.first_stop[rows] = np.where(found.first_stop[rows] < 0, when, found.first_stop[rows])
        found.stopped_through[rows[next_step <= total]] = unit.end
        self._anchor[rows] = when
        self._due[rows] = -(-next_step // self._interval[rows]) * self._interval[rows]
        self._walk(rows[found.own[rows]], unit)

    def _walk(self, rows: NDArray[np.int64], unit: Unit) -> None:
        """Move settings to the stage that the stop leads to; clear `own` where that stage was not trained."""
        found, stages = self._found, self._trace.stages
        actions: dict[int, str] = {}
        own = np.zeros(len(rows), bool)
        for place, (stage, when, braking) in enumerate(
            zip(found.stage[rows].tolist(), self._anchor[rows].tolist(), self._braking[rows].tolist(), strict=True)
        ):
            there = stages[stage].children.get(when)
            if there is None:
                continue
            if braking not in actions:
                actions[braking] = stop_action(self._config, self._blueprint, unit.end, braking)
            child = there.get(actions[braking])
            if child is not None:
                found.stage[rows[place]] = child
                own[place] = True
        found.own[rows] = own

    def _note(
        self,
        rows: NDArray[np.int64],
        unit: Unit,
        when: NDArray[np.int64],
        ratios: NDArray[np.float64],
        rules: NDArray[np.int64],
    ) -> None:
        texts: dict[tuple[int, float, int], str] = {}
        events = self._found.events
        for row, key in zip(rows.tolist(), zip(when.tolist(), ratios.tolist(), rules.tolist(), strict=True),
                            strict=True):  # fmt: skip
            text = texts.get(key)
            if text is None:
                iteration, ratio, rule = key
                decision = Decision(layer=unit.end, rule=_RULES[rule], ratio=ratio)
                event = self._blueprint.event(iteration, decision, self._settings)
                text = texts[key] = json.dumps(vars(event))  # in the order of the fields
            events[row] = f"{events[row]}, {text}" if events[row] else text


def _first(flags: NDArray[np.bool_]) -> int:
    """Return the index of the first flag that is set; the number of flags if none is."""
    place = int(flags.argmax()) if len(flags) else 0
    return place if len(flags) and flags[place] else len(flags)
