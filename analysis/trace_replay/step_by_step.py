"""Replay of single configurations of any rule, by running its state machine over the recorded signals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.trace_replay.traces import Predicted, RunTrace, spared, trains_after
from trainables.config import TrialConfig
from trainables.gradskip.replay import Blueprint, GradskipReplay, StopEvent
from trainables.gradskip.rules.schedule_rules import FreezeOutRule
from trainables.gradskip.rules.state_machine import first_step_after
from trainables.interventions import MissingSignal


class RecordedPath:
    """Recorded signals along a run's path of stages; each from the deepest stage that has it."""

    def __init__(self, trace: RunTrace) -> None:
        self._trace = trace
        self.stage = 0
        """Index of the deepest recorded stage on the path."""
        self.own = True
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
        """Continue the path after an intervention."""
        self._entered = iteration + 1
        if self.own:
            child = self._trace.stages[self.stage].children.get(iteration, {}).get(action)
            self.own = child is not None
            self.stage = self.stage if child is None else child


def replay_one(trace: RunTrace, config: TrialConfig) -> Predicted:
    """Replay one configuration of any rule.

    Raises:
        UserError: the study has not recorded the plan of layers or the costs for it, or a layer number is too large.
    """
    replay, path, known = follow(trace, config)
    found = Predicted.nothing(1, trace)
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
    """Return the replay of a configuration at its end, its path, and whether all signals that it reads are recorded.

    Raises:
        UserError: the study has not recorded the plan of layers for it.
    """
    replay, path = GradskipReplay(config, trace.blueprint(config)), RecordedPath(trace)
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


def _count(trace: RunTrace, blueprint: Blueprint, events: Sequence[StopEvent], distance: int, found: Predicted) -> None:
    """Add the FLOPs that the stops save to `found`."""
    through, before = -1, trace.trains
    for event in events:
        reached = max(through, _position(blueprint, event))
        after = trains_after(trace, blueprint, reached)
        first_spared = first_step_after(event.iteration, distance)
        if first_spared < trace.total_steps:
            all_flops, backward = spared(trace, before, after, first_spared)
            found.spared += all_flops
            found.spared_backward += backward
        through, before = reached, after


def _position(blueprint: Blueprint, event: StopEvent) -> int:
    """Return the position of the last parameter that a stop event stops."""
    if event.rule == "manual":
        return blueprint.plan.position_of_stop(event.layer)
    return next(unit.end for unit in blueprint.plan.units if unit.number == event.layer)
