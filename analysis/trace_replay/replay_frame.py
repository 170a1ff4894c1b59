"""Prediction of what settings stop and save, from recorded training, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.trace_replay.traces import (
    Outcomes,
    RunTrace,
    facts_key,
    nothing_stopped,
    spared,
    take_outcomes,
    trains_after,
)
from trainables.config import TrialConfig
from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import estimator_in
from trainables.gradskip.replay import Blueprint, GradskipReplay, StopEvent, Unit, signal_name, stop_action
from trainables.gradskip.rules.freezeout import FreezeOutRule
from trainables.gradskip.rules.published import next_examination
from trainables.gradskip.rules.published_batch import CONDITIONS, AutoNumbers, Curve, examinations
from trainables.gradskip.rules.state_machine import Decision, first_step_after
from trainables.gradskip.settings import OFF_FIELD
from trainables.gradskip.variables import BY_NAME, DEFAULT_SAMPLES, VARIABLES
from trainables.interventions import MissingSignal
from trainables.savings import share_of_budget

# --- Settings grouped by how they are replayed: those without any stop, those of the variance rule, and the others ----
# A configuration that compresses trains on other weights than the recorded ones, so it cannot be replayed.
#
# The seven numbers of the variance rule (thresholds, timing, braking) are stored as columns, so that a hundred thousand
# settings do not need as many objects.

#: The numbers of the variance rule, by the fields of `AutoNumbers` or of `Settings`.
AUTO_COLUMNS = {v.name: v for v in VARIABLES if v.published and v.mode in ("auto", "both")}
#: Fields of a configuration that replay reads; workload and length are those of the trace.
_READ = (*BY_NAME, "forward_cache_mb", "method")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Group of settings that are replayed together."""

    rows: NDArray[np.int64]  # (n,) indices of the settings in the given order
    config: TrialConfig  # configuration of all n settings; for the variance rule, without its numbers
    auto: AutoNumbers | None = None
    """Numbers of the variance rule for each setting; None: all n settings equal `config`."""
    never_acts: bool = False  # true if these settings stop nothing on any run
    foreign: bool = False  # true if these settings also compress, so that they cannot be replayed


def batches(settings: Any) -> tuple[pd.Index, list[Batch]]:
    """Group settings, in any form that `replay` takes, by how they are replayed.

    Returns their index, and batches that contain each setting once; DataFrame rows that compress are `foreign`.
    UserError: an unknown variable, an invalid value, or a setting outside a DataFrame that compresses.
    """
    index, columns = _columns_of_settings(settings)
    count = len(index)
    others = [name for name in columns if name not in AUTO_COLUMNS]
    auto = {name: _numbers(name, columns.get(name), count) for name in AUTO_COLUMNS}
    groups: dict[tuple[Any, ...], list[int]] = {}
    cells = [[_cell(name, value) for value in columns[name]] for name in others]
    for row, key in enumerate(zip(*cells, strict=True) if cells else [()] * count):
        groups.setdefault(key, []).append(row)
    found = []
    for key, places in groups.items():
        fixed = {name: value for name, value in zip(others, key, strict=True) if value is not None}
        found += _sorted_out(fixed, np.array(places, dtype=np.int64), auto)
    return index, found


def _sorted_out(
    fixed: Mapping[str, Any], rows: NDArray[np.int64], auto: Mapping[str, NDArray[np.float64]]
) -> list[Batch]:
    # The variance rule's numbers have no effect under other rules, so they are left out here.
    probe = TrialConfig(**fixed)
    if probe.compresses or estimator_in(probe.method):
        return [Batch(rows=rows, config=probe, foreign=True)]
    found = []
    if probe.method != "none" and probe.gradskip_settings().mode == "auto":
        off = auto["CAC_VAR_START_THR"][rows] == -1
        if off.any():
            config = TrialConfig(**{**fixed, **OFF_FIELD})
            found.append(Batch(rows=rows[off], config=config, never_acts=True))
        if probe.gradskip_settings().stop_interval:  # not in batches
            for row in rows[~off]:
                own = {name: auto[name][row] for name in AUTO_COLUMNS if not np.isnan(auto[name][row])}
                own = {name: int(value) if AUTO_COLUMNS[name].kind is int else value for name, value in own.items()}
                found.append(Batch(rows=np.array([row]), config=TrialConfig(**{**fixed, **own})))
        elif not off.all():
            found.append(Batch(rows=rows[~off], config=probe, auto=_auto_numbers(rows[~off], auto)))
        return found
    braking = np.nan_to_num(auto["CAC_BRAKING_DISTANCE"][rows], nan=0.0).astype(np.int64)
    for distance in np.unique(braking):
        config = TrialConfig(**{**fixed, "CAC_BRAKING_DISTANCE": int(distance)}) if distance else probe
        found.append(Batch(rows=rows[braking == distance], config=config, never_acts=config.method == "none"))
    return found


#: Variables by the fields of `AutoNumbers`.
_VARIABLE_OF = {
    **{name: f"CAC_VAR_{name.upper()}" for name in ("start_itr", "start_thr", "mt_count_thr", "mt_thr", "slope_thr")},
    "braking": "CAC_BRAKING_DISTANCE",
    "interval": "CAC_VAR_SAMPLES",
}


def _auto_numbers(rows: NDArray[np.int64], auto: Mapping[str, NDArray[np.float64]]) -> AutoNumbers:
    numbers: dict[str, NDArray[Any]] = {}
    for field, name in _VARIABLE_OF.items():
        default = AUTO_COLUMNS[name].default
        if field == "interval":  # as in `Settings.sampling_interval`
            default = np.where(numbers["braking"] > 0, numbers["braking"], DEFAULT_SAMPLES)
        values = np.where(np.isnan(auto[name][rows]), default, auto[name][rows])
        numbers[field] = values.astype(np.int64) if AUTO_COLUMNS[name].kind is int else values
    return AutoNumbers(**numbers)


def _columns_of_settings(settings: Any) -> tuple[pd.Index, dict[str, Sequence[Any] | NDArray[Any]]]:
    """Return the index of the settings, and the fields that at least one setting gives, as columns."""
    if isinstance(settings, pd.DataFrame):
        for name in settings.columns:
            if str(name).startswith("CAC") and name not in BY_NAME:
                raise unknown_name("variable", str(name), BY_NAME)
        return settings.index, {name: settings[name].to_numpy() for name in _READ if name in settings.columns}
    configs = [settings] if isinstance(settings, TrialConfig) else settings
    if isinstance(configs, Sequence) and configs and all(isinstance(values, Mapping) for values in configs):
        return _columns_of_settings(pd.DataFrame(configs, dtype=object))
    if not isinstance(configs, Sequence) or not all(isinstance(config, TrialConfig) for config in configs):
        raise UserError(f"settings must be a TrialConfig, several of them or a DataFrame, got {settings!r}")
    for config in configs:
        if estimator_in(config.method) or config.compresses:
            raise UserError(
                f"replay predicts Gradient-Skip alone, got a setting with method {config.method}, which trains on "
                "other weights or steps than were recorded: train it, or replay its Gradient-Skip with method gradskip"
            )
    given = {name: [getattr(config, name) for config in configs] for name in _READ}
    index = pd.RangeIndex(len(configs))
    return index, {name: values for name, values in given.items() if any(value is not None for value in values)}


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _numbers(name: str, cells: Sequence[Any] | NDArray[Any] | None, count: int) -> NDArray[np.float64]:
    """Convert a column of the variance rule to float64, NaN where not given; raise where a value is invalid."""
    variable = BY_NAME[name]
    whole = variable.kind is int
    if cells is None:
        return np.full(count, np.nan)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        values = cells.astype(np.float64)
    else:
        values = np.array([np.nan if _is_missing(cell) else _number(name, cell) for cell in cells], dtype=np.float64)
    distinct = np.unique(values[~np.isnan(values)])
    # Valid values form an interval (START_THR also allows -1), so checking the ends and one fraction is sufficient.
    suspects = np.concatenate([distinct[:2], distinct[-1:], distinct[distinct % 1 != 0][:1] if whole else distinct[:0]])
    for value in suspects.tolist():
        variable.check(int(value) if whole and value.is_integer() else value)
    return values


def _number(name: str, cell: Any) -> Any:
    if isinstance(cell, str):
        return BY_NAME[name].read(cell)
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        BY_NAME[name].check(cell)
    return cell


def _cell(name: str, value: Any) -> Any:
    """Convert a value of another column to the type that `TrialConfig` expects, None where not given."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(item.item() if isinstance(item, np.generic) else item for item in value)
    if _is_missing(value):
        return None
    value = value.item() if isinstance(value, np.generic) else value
    if name not in BY_NAME:
        return int(value) if isinstance(value, float) and value.is_integer() else value
    variable = BY_NAME[name]
    if isinstance(value, str):
        return tuple(json.loads(value)) if value.startswith("[") else variable.read(value)
    # A DataFrame has converted integers and flags with gaps to float64.
    if variable.kind is bool and value in (0, 1):
        return bool(value)
    return int(value) if variable.kind is int and isinstance(value, float) and value.is_integer() else value


# --- Replay of single configurations of any rule, by running its state machine over the recorded signals --------------


class RecordedPath:
    """Recorded signals along a run's path of stages; each from the deepest stage that has it."""

    def __init__(self, trace: RunTrace, config: TrialConfig) -> None:
        self._trace = trace
        self.stage = 0  # index of the deepest recorded stage on the path
        self.own = trace.begins(config)
        """True if the path ends in this stage; False after a step that was never trained."""
        self.certain_until = trace.total_steps
        """First iteration at which a value of another run was read; the run's length for none."""
        self._entered = 0

    def at(self, name: str, iteration: int) -> float:
        """Return the signal at an iteration; raise MissingSignal if no stage on the path has it."""
        foreign = not self.own and iteration >= self._entered
        place: int | None = self.stage
        while place is not None:
            stage = self._trace.stages[place]
            if stage.start <= iteration:
                if iteration < stage.known_until and stage.recorded.has(name, iteration):
                    break
                foreign = True
            place = stage.parent
        if place is None or foreign:
            self.own = False
            self.certain_until = min(self.certain_until, iteration)
        if place is None:
            raise MissingSignal(name)
        return self._trace.stages[place].recorded.at(name, iteration)

    def enter(self, iteration: int, action: str) -> None:
        self._entered = iteration + 1
        if self.own:
            child = self._trace.stages[self.stage].children.get(iteration, {}).get(action)
            self.own = child is not None
            self.stage = self.stage if child is None else child


def replay_one(trace: RunTrace, config: TrialConfig) -> Outcomes:
    """Replay one configuration of any rule.

    UserError: the study has not recorded the plan of layers or the costs for it, or a layer number is too large.
    """
    replay, path, known = follow(trace, config)
    found = nothing_stopped(1, trace)
    found.unknown[0] = not known
    columns = replay.columns()
    found.stops[0] = len(replay.events)
    found.stopped_through[0] = columns["stopped_through"]
    found.first_stop[0] = replay.events[0].iteration if replay.events else -1
    found.events[0] = columns["stop_events"][1:-1]
    found.certain_until[0], found.stage[0], found.own[0] = path.certain_until, path.stage, path.own
    _count(trace, trace.blueprint(config), replay.events, replay.machine.distance, found)
    return found


def follow(trace: RunTrace, config: TrialConfig) -> tuple[GradskipReplay, RecordedPath, bool]:
    """Return the replay of a configuration at its end, its path, and whether all signals that it reads are recorded."""
    replay, path = GradskipReplay(config, trace.blueprint(config)), RecordedPath(trace, config)
    try:
        if isinstance(replay.machine.rule, FreezeOutRule):
            _follow_schedule(replay, replay.machine.rule, path, trace.total_steps)
        while (intervention := replay.advance(path, trace.total_steps)) is not None:
            path.enter(intervention.iteration, intervention.action)
    except MissingSignal:
        return replay, path, False
    return replay, path, True


def _follow_schedule(replay: GradskipReplay, rule: FreezeOutRule, path: RecordedPath, total_steps: int) -> None:
    """Replay freezeout, which scales learning rates at every step, only at its stops."""
    intervention = replay.advance(path, 1)  # the whole schedule is one intervention at the first step
    assert intervention is not None
    path.enter(intervention.iteration, intervention.action)
    while rule.position < rule.stoppable and (due := math.ceil(rule.ends[rule.position])) < total_steps:
        replay.machine.iteration = max(due, replay.machine.iteration)
        replay.advance(path, replay.machine.iteration + 1)
    replay.machine.iteration = total_steps


def _count(trace: RunTrace, blueprint: Blueprint, events: Sequence[StopEvent], distance: int, found: Outcomes) -> None:
    through, before = -1, trace.trains
    for event in events:
        reached = max(through, _position(blueprint, event))
        after = trains_after(trace, blueprint, reached)
        first_spared = first_step_after(event.iteration, distance) if event.iteration >= 0 else 0
        if first_spared < trace.total_steps:
            all_flops, backward = spared(trace, before, after, first_spared)
            found.spared += all_flops
            found.spared_backward += backward
        through, before = reached, after


def _position(blueprint: Blueprint, event: StopEvent) -> int:
    if event.rule == "manual":
        return blueprint.plan.position_of_stop(event.layer)
    return next(unit.end for unit in blueprint.plan.units if unit.number == event.layer)


# --- Batched replay of the variance rule (`trainables.gradskip.rules.published_batch`) on the stages of a trace
# After a stop, settings differ only in their recorded stage, the iteration of the last decision, the earliest iteration
# of the next one, their sampling interval, and their thresholds. Settings that differ only in thresholds read the same
# values, so they share a curve. The outer loop runs over the layers, because each stop advances to the next one.
#
# Shapes: n settings, T steps.


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


def replay_auto(trace: RunTrace, config: TrialConfig, numbers: AutoNumbers) -> Outcomes:
    """Replay the variance rule for n settings; ``config`` is theirs without the numbers of the rule.

    UserError: the study has not recorded the plan of layers or the costs for these settings.
    """
    replay = _Replay(trace, config, numbers)
    found = replay.run()
    for row in np.flatnonzero(replay.still):
        own = {name: getattr(numbers, field)[row].item() for field, name in _VARIABLE_OF.items()}
        one = replace(config, **own)
        take_outcomes(found, np.array([row]), replay_one(trace, one))
    return found


class _Replay:
    def __init__(self, trace: RunTrace, config: TrialConfig, numbers: AutoNumbers) -> None:
        self._trace = trace
        self._config = config
        self._settings = config.gradskip_settings()
        self._blueprint = trace.blueprint(config)
        self._numbers = numbers.rounded(single_precision=self._blueprint.single_precision)  # not in every group again
        count = len(numbers.interval)
        self._found = nothing_stopped(count, trace, own=trace.begins(config))
        self._anchor = np.full(count, -1, np.int64)  # iteration at which the current target became current
        self._due = next_examination(numbers.start_itr, numbers.interval)
        self.still = np.zeros(count, bool)
        """Settings that may pass over a layer which does not move, which is not replayed here."""

    def run(self) -> Outcomes:
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
            # Index 0 is the anchor, the last decision; for settings that left their run since, it was still that run's.
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


#: Columns of `replay` with their meanings.
COLUMNS = {
    "stops": "stops decided",
    "stopped_through": "position of the last parameter stopped at the end, -1 for none, as in a trial's row",
    "first_stop": "iteration of the first decision, -1 for none, and for one before the first step",
    "stop_events": "JSON list of the stops: iteration, layer, name, ratio, rule, as in a trial's row",
    "compute_saved": "1 - executed / dense FLOPs, as in a trial's row; NaN where it cannot be predicted",
    "backward_saved": "the same, of the backward FLOPs alone",
    "exact": "whether the whole run was trained before, so that all of this is what training again would give",
    "accuracy": "that run's accuracy, or the study's metric under its own name; NaN unless exact",
    "exact_until": "stops before this iteration are certain, and that there are no others; the run's length for all",
    "stage": "id of the deepest recorded stage that the run goes through; its last one where exact",
}


def replay(trace: RunTrace, settings: Any) -> pd.DataFrame:
    """Predict what settings stop and save on a recorded run.

    A setting's rule is replayed over the recorded signals, stage by stage, as long as a recorded trial made the same
    stops; this part is exact. Beyond it, signals are taken from the deepest stage of its path that is recorded at that
    iteration, and finally from the run without a method. This is an estimate, as there layers still train that are
    stopped in the setting's own run. The first stop is always exact. A setting that acts from the first step on
    (``CAC_NORM_STATISTICS=hold_all``, ``CAC_LR_FACTOR``) trains otherwise than a run without: of it what no signal
    decides is certain.

    Savings of a forward cache (``forward_cache_mb``) and of parameters that ``CAC_PREFIX_AUTOGRAD=0`` stops in addition
    are not predicted, except where the run is recorded. Rules whose signal is recorded only while they run
    (gradient_norm, plasticity) have NaN savings, and ``exact`` False, if no trial has recorded them with these timings.

    Args:
        trace: trace from `load_trace`.
        settings: a `TrialConfig`, a sequence of these, or a DataFrame with its fields as columns, or its rows as
            mappings (missing and NaN: published default; other columns are not read). Workload and length are those of
            the trace. A hundred thousand settings of the variance rule take seconds as a DataFrame. Rows that also
            compress have NaN savings and no other results.

    One row per setting, on the index of the settings, with the columns of `COLUMNS`. UserError: an unknown variable, an
    invalid value, a `TrialConfig` that compresses, or a setting for which the study has not recorded the plan of layers
    or costs (`missing_facts`, `missing_costs`).
    """
    index, found = batches(settings)
    predicted = nothing_stopped(len(index), trace)
    more = np.zeros(len(index), bool)
    for batch in found:
        more[batch.rows] = batch.config.forward_cache_mb > 0 or not batch.config.gradskip_settings().prefix_autograd
        if batch.foreign:
            predicted.certain_until[batch.rows] = 0
            predicted.own[batch.rows], predicted.unknown[batch.rows] = False, True
        elif batch.never_acts:
            predicted.own[batch.rows] = trace.begins(batch.config)
        else:
            auto = batch.auto
            part = replay_one(trace, batch.config) if auto is None else replay_auto(trace, batch.config, auto)
            take_outcomes(predicted, batch.rows, part)
    frame = pd.DataFrame(_columns(trace, predicted, more), index=index, copy=False)
    frame.attrs["quality"] = trace.quality
    return frame


def _columns(trace: RunTrace, found: Outcomes, more: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the columns; ``more`` says which settings save more than the gradients of their stopped layers."""
    dense, dense_backward = map(int, trace.costs_of(trace.trains).before(trace.total_steps))
    results = [stage.result(trace.total_steps) for stage in trace.stages]
    exact = found.own & ~found.unknown & np.array([result is not None for result in results])[found.stage]

    def recorded(name: str) -> NDArray[np.float64]:
        values = [np.nan if result is None else result.get(name, np.nan) for result in results]
        return np.array(values, np.float64)[found.stage]

    def saved(name: str, spared: NDArray[Any], budget: int) -> NDArray[np.float64]:
        values = np.asarray(share_of_budget(spared, budget), dtype=np.float64)
        return np.where(found.unknown, np.nan, np.where(more & exact, recorded(name), values))

    return {
        "stops": found.stops,
        "stopped_through": found.stopped_through,
        "first_stop": found.first_stop,
        "stop_events": "[" + found.events + "]",
        "compute_saved": saved("compute_saved", found.spared, dense),
        "backward_saved": saved("backward_saved", found.spared_backward, dense_backward),
        "exact": exact,
        trace.quality.name: np.where(exact, recorded("quality"), np.nan),
        "exact_until": found.certain_until,
        "stage": np.array([stage.id for stage in trace.stages], object)[found.stage],
    }


def missing_facts(trace: RunTrace, settings: Any) -> list[TrialConfig]:
    """Return one configuration for each plan of layers that `replay` of these settings needs and the trace lacks."""
    configs = [batch.config for batch in batches(settings)[1] if _is_followed(batch)]
    wanted = {facts_key(config): config for config in configs}
    return [config for key, config in wanted.items() if key not in trace.facts]


def missing_costs(trace: RunTrace, settings: Any) -> list[str]:
    """Return sets of parameters (`RunTrace.trains`) whose costs the trace lacks and `replay` of settings may need.

    UserError: the study has not recorded the plan of layers of a setting (`missing_facts`).
    """
    wanted = {trace.trains: None}
    for batch in batches(settings)[1]:
        if _is_followed(batch):
            blueprint = trace.blueprint(batch.config)
            for through in _ends(blueprint, batch.config):
                wanted[trains_after(trace, blueprint, through)] = None
    return [trains for trains in wanted if trains not in trace.costs]


def _is_followed(batch: Batch) -> bool:
    return not (batch.never_acts or batch.foreign)


def _ends(blueprint: Blueprint, config: TrialConfig) -> Iterable[int]:
    numbers = config.gradskip_settings().stop_layer_num
    if numbers is not None:
        config.gradskip_settings().check_layers(len(blueprint.plan.order))
        return [blueprint.plan.position_of_stop(number) for number in numbers]
    return [unit.end for unit in blueprint.plan.units[: blueprint.stoppable]]
