"""Batched replay of the variance rule (`trainables.gradskip.rules.published_batch`) on the stages of a trace.

After a stop, settings differ only in their recorded stage, the iteration of the last decision, the earliest iteration
of the next one, their sampling interval, and their thresholds. Settings that differ only in thresholds read the same
values, so they share a curve. The outer loop runs over the layers, because each stop advances to the next one.

Shapes: n settings, T steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.step_by_step import replay_one
from analysis.trace_replay.traces import Predicted, RunTrace, spared, trains_after
from trainables.config import TrialConfig
from trainables.gradskip.replay import Unit, signal_name, stop_action
from trainables.gradskip.rules.published import next_examination
from trainables.gradskip.rules.published_batch import CONDITIONS, AutoNumbers, Curve, examinations
from trainables.gradskip.rules.state_machine import Decision, first_step_after


def _views(trace: RunTrace, name: str) -> Callable[[int | None], tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Return a function of a stage's index: its variances of a layer, continued from its ancestors where not recorded.

    It returns (T,) values, whether each is recorded in any stage, and whether in the stage's own run.
    """
    total = trace.total_steps

    @cache
    def view(place: int | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        if place is None:
            return np.full(total, np.nan), np.zeros(total, bool), np.zeros(total, bool)
        stage = trace.stages[place]
        values, known, own = view(stage.parent)
        values, known, own = values.copy(), known.copy(), own.copy()
        own[stage.start :] = False
        recorded, there = stage.signal(name)
        recorded, there = recorded[: total - stage.start], there[: total - stage.start]
        span = slice(stage.start, stage.start + len(recorded))
        values[span] = np.where(there, recorded, values[span])
        known[span] |= there
        own[span] = there
        return values, known, own

    return view


def replay_auto(trace: RunTrace, config: TrialConfig, numbers: AutoNumbers) -> Predicted:
    """Replay the variance rule for n settings.

    Args:
        trace: recorded training.
        config: the configuration without the numbers of the rule.
        numbers: the numbers of the rule for n settings.

    Raises:
        UserError: the study has not recorded the plan of layers or the costs for these settings.
    """
    replay = _Replay(trace, config, numbers)
    found = replay.run()
    for row in np.flatnonzero(replay.still):
        own = {name: getattr(numbers, name)[row].item() for name in _FIELDS}
        one = replace(config, **{_FIELDS[name]: value for name, value in own.items()})
        found.put(np.array([row]), replay_one(trace, one))
    return found


#: Fields of a configuration by those of `AutoNumbers`.
_FIELDS = {
    **{name: f"CAC_VAR_{name.upper()}" for name in ("start_itr", "start_thr", "mt_count_thr", "mt_thr", "slope_thr")},
    "interval": "CAC_VAR_SAMPLES",
    "braking": "CAC_BRAKING_DISTANCE",
}


class _Replay:
    def __init__(self, trace: RunTrace, config: TrialConfig, numbers: AutoNumbers) -> None:
        self._trace = trace
        self._config = config
        self._settings = config.gradskip_settings()
        self._blueprint = trace.blueprint(config)
        self._numbers = numbers.rounded(single_precision=self._blueprint.single_precision)  # not in every group again
        count = len(numbers.interval)
        self._found = Predicted.nothing(count, trace)
        self._anchor = np.full(count, -1, np.int64)  # iteration at which the current target became current
        self._due = next_examination(numbers.start_itr, numbers.interval)
        self.still = np.zeros(count, bool)
        """Settings that may pass over a layer which does not move, which is not replayed here."""

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
        view = _views(self._trace, signal_name(self._settings, unit.watched))
        when = np.full(len(looking), -1, np.int64)
        ratios, rules = np.full(len(looking), np.nan), np.zeros(len(looking), np.int64)
        found, single, total = self._found, self._blueprint.single_precision, self._trace.total_steps
        for members in self._alike(looking):
            rows = looking[members]
            leader = rows[0]
            values, known, own = view(int(found.stage[leader]))
            looks = examinations(
                begin=int(self._due[leader]),
                end=total,
                start_itr=0,  # the due iteration is past it
                interval=int(self._numbers.interval[leader]),
                anchor=None if first else int(self._anchor[leader]),
            )
            missing = _first(~known[looks])
            read = values[looks[:missing]]
            same = read[1:] == read[:-1]
            if (same[1:] & same[:-1]).any():
                self.still[rows] = True
            seen = Curve.of(looks[:missing], values[looks[:missing]], single_precision=single)
            places, rules[members] = seen.stops(self._numbers, rows, first=first, single_precision=False)
            fired = places < missing
            when[members[fired]] = looks[places[fired]]
            ratios[members[fired]] = seen.ratios[places[fired]]
            # Index 0 is the anchor, the last decision; its value was still of their own run for settings off it now.
            foreign = np.where(found.own[rows], _first(~own[looks]), 0 if first else 1)
            blind = (places >= missing) & (missing < len(looks))
            doubtful = blind | (foreign <= np.minimum(places, len(looks) - 1))
            guess = np.minimum(foreign, np.where(blind, missing, len(looks)))[doubtful]
            found.unknown[rows[blind]] = True
            found.own[rows[doubtful]] = False
            since = found.certain_until[rows[doubtful]]
            found.certain_until[rows[doubtful]] = np.minimum(since, np.append(looks, total)[guess])
        return when, ratios, rules

    def _alike(self, looking: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return indices into ``looking``, grouped by settings that read the same values."""
        keys = np.stack([a[looking] for a in (self._found.stage, self._anchor, self._due, self._numbers.interval)])
        order = np.lexsort(keys)
        changes = (keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0)
        return np.split(order, np.flatnonzero(changes) + 1)

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _stop(self, rows: NDArray[np.int64], unit: Unit, when: NDArray[np.int64], before: str, after: str) -> None:
        found, total = self._found, self._trace.total_steps
        next_step = first_step_after(when, self._numbers.braking[rows])
        all_flops, backward = spared(self._trace, before, after, np.minimum(next_step, total))
        found.spared[rows] += all_flops
        found.spared_backward[rows] += backward
        found.stops[rows] += 1
        found.first_stop[rows] = np.where(found.first_stop[rows] < 0, when, found.first_stop[rows])
        found.stopped_through[rows[next_step <= total]] = unit.end
        self._anchor[rows] = when
        self._due[rows] = next_examination(next_step, self._numbers.interval[rows])
        self._walk(rows[found.own[rows]], unit)

    def _walk(self, rows: NDArray[np.int64], unit: Unit) -> None:
        """Move settings to the stage that the stop leads to; clear `own` where that stage was not trained."""
        found, stages = self._found, self._trace.stages

        @cache
        def action(braking: int) -> str:
            return stop_action(self._config, self._blueprint, unit.end, braking)

        known = (array[rows].tolist() for array in (found.stage, self._anchor, self._numbers.braking))
        there = ((stages[stage].children.get(when, {}), braking) for stage, when, braking in zip(*known, strict=True))
        after = np.array([below.get(action(braking), -1) if below else -1 for below, braking in there], np.int64)
        found.own[rows] = after >= 0
        found.stage[rows] = np.where(after >= 0, after, found.stage[rows])

    def _note(
        self,
        rows: NDArray[np.int64],
        unit: Unit,
        when: NDArray[np.int64],
        ratios: NDArray[np.float64],
        rules: NDArray[np.int64],
    ) -> None:
        events = self._found.events

        @cache
        def text(iteration: int, ratio: float, rule: int) -> str:
            decision = Decision(layer=unit.end, rule=CONDITIONS[rule], ratio=ratio)
            return json.dumps(vars(self._blueprint.event(iteration, decision, self._settings)))  # in the fields' order

        for row, *event in zip(rows.tolist(), when.tolist(), ratios.tolist(), rules.tolist(), strict=True):
            events[row] += f", {text(*event)}" if events[row] else text(*event)


def _first(flags: NDArray[np.bool_]) -> int:
    """Return the index of the first flag that is set; the number of flags if none is."""
    place = int(flags.argmax()) if len(flags) else 0
    return place if len(flags) and flags[place] else len(flags)
