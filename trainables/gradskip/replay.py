"""Replay of Gradient-Skip over recorded training: the same state machine on recorded signals. Without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from trainables.config import TrialConfig
from trainables.gradskip.rules.choice import NAMED, make_rule
from trainables.gradskip.rules.state_machine import Decision, SkipMachine
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import MEASURED_RULES
from trainables.interventions import Intervention, MethodReplay, MissingSignal, Recorded, action_text

# --- Watched layers, the parameters that stop with them, and the machine built from them ------------------------------
# A `Blueprint` contains all that a rule needs of a model: with it any settings can be replayed over a recorded run
# without building the model again.


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A watched layer and the position at which its stop ends."""

    number: int  # the layer's number: that of its (first) watched parameter
    watched: tuple[int, ...]  # numbers of the weights that the rule measures: one, or a block's weights together
    end: int  # position of the last parameter that stops with it; everything before stops too


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The watched layers, and the order in which parameters stop."""

    order: tuple[int, ...]  # position to number; a permutation of 0..P-1
    units: tuple[Unit, ...]  # watched layers by ascending `Unit.end`
    whole_units: bool = False  # true if a manual stop includes the whole unit of its layer
    ends: tuple[int, ...] = ()
    """Positions at which whole units end, ascending, those of layers that the user has frozen included."""
    last_end: int = -1  # position of the last unit's bias and norm, which are no rest to train; -1 if not known

    def position_of_stop(self, number: int) -> int:
        """Return the last position that a manual stop of this number includes."""
        position = self.order.index(number)
        if not self.whole_units or not self.ends:  # without ends no layer is watched, so no units are known
            return position
        return next((end for end in self.ends if end >= position), len(self.order) - 1)

    def without_last(self, trains: Callable[[int], bool]) -> tuple[Unit, ...]:
        """Return the units that a rule may stop: those that leave a parameter for which ``trains(number)`` holds."""
        last = max((position for position, number in enumerate(self.order) if trains(number)), default=-1)
        return tuple(u for u in self.units if max(u.end, self.last_end if u is self.units[-1] else -1) < last)


@dataclass(frozen=True, kw_only=True)
class StopEvent:
    """One stop decision."""

    iteration: int  # optimizer steps before the one that decided, from 0
    layer: int  # the layer's number; it and everything before it stop
    name: str | None  # the parameter's name, where a model or named parameters were given
    ratio: float | None
    """Number compared with the threshold, such as weight variance over its peak; None where nothing is measured."""
    rule: str  # ``start``, ``mountain``, ``slope``, ``manual``, or the name of another rule


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything that a rule needs to know of a model."""

    plan: LayerPlan  # its layers
    stoppable: int  # the number of the plan's units, from the front, that a rule may stop
    names: tuple[str, ...] | None  # names of the parameters by number, where known
    single_precision: bool  # true if ratios are compared in float32, as the published code does with float32 weights

    def machine(self, settings: Settings) -> SkipMachine:
        """Return a machine in its initial state."""
        manual = None
        if settings.mode == "manual" and settings.stop_layer_num is not None:
            manual = [self.plan.position_of_stop(number) for number in settings.stop_layer_num]
        rule = make_rule(
            settings,
            [unit.end for unit in self.plan.units],
            stoppable=self.stoppable,
            manual=manual,
            single_precision=self.single_precision,
        )
        return SkipMachine(settings, rule)

    def event(self, iteration: int, decision: Decision, settings: Settings) -> StopEvent:
        if decision.rule == "manual":
            assert settings.stop_layer_num is not None
            number = settings.stop_layer_num[decision.index]
        else:
            number = next(unit.number for unit in self.plan.units if unit.end == decision.layer)
        return StopEvent(
            iteration=iteration,
            layer=number,
            name=None if self.names is None else self.names[number],
            ratio=decision.ratio,
            rule=decision.rule,
        )

    def stopped_numbers(self, through: int) -> tuple[int, ...]:
        """Return the numbers of the parameters up to a position, ascending."""
        return tuple(sorted(self.plan.order[: through + 1]))

    def order_digest(self) -> str:
        """Return a digest of the stop order; empty where parameters stop in numbering order."""
        order = self.plan.order
        if order == tuple(range(len(order))):
            return ""
        return hashlib.sha256(repr(order).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Blueprint:
        """Build the blueprint from the result of `to_dict`, also after a conversion to JSON and back."""
        return _BLUEPRINT.validate_python(values)


_BLUEPRINT = TypeAdapter(Blueprint)

# --- Replay of Gradient-Skip over recorded training -------------------------------------------------------------------


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key; configurations of one workload with equal keys have equal blueprints."""
    return ("gradskip", *layers_key(config.gradskip_settings()))


def layers_key(settings: Settings) -> tuple[Any, ...]:
    """Return a key; settings with equal keys have equal layers in one model."""
    # A rule that is off does not need the execution order of the layers, and its units may differ.
    looks = "off" if settings.mode == "off" else settings.mode == "auto"
    return (looks, settings.watch, settings.whole_units, settings.targets)


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> GradskipReplay:
    """Return the replay of a configuration; ``facts`` is its blueprint's `to_dict`."""
    return GradskipReplay(config, Blueprint.from_dict(facts))


def signal_name(settings: Settings, watched: Sequence[int]) -> str:
    """Return the name under which a rule's signal of a layer is recorded; but for variances it says when, too."""
    if settings.mode == "auto":
        return variance_name(watched)
    return f"{settings.mode}/{settings.rule_start_itr}/{settings.rule_interval}:{'+'.join(map(str, watched))}"


def variance_name(watched: Sequence[int]) -> str:
    """Return the name under which the weight variance of a layer is recorded."""
    return f"variance:{'+'.join(map(str, watched))}"


def checkpoint_kind(settings: Settings) -> str:
    """Return the kind of a checkpoint that holds the rule's own measurements, of the layers that it watches."""
    if settings.mode in MEASURED_RULES:
        layers = hashlib.sha256(repr((settings.watch, settings.whole_units)).encode()).hexdigest()[:8]
        return f"{settings.mode}-{settings.rule_start_itr}-{settings.rule_interval}-{layers}"
    return "any"


def stop_action(
    config: TrialConfig, blueprint: Blueprint, through: int, braking: int, *, at_once: int | None = None
) -> str:
    """Return the action of a stop through a position after ``braking`` iterations, under the config's settings.

    What ends at the position ``at_once``, or before it, has stopped before the first step.
    """
    action: dict[str, Any] = {"stop": blueprint.stopped_numbers(through), "braking": braking}
    if at_once is not None:
        action["at_once"] = at_once
    if blueprint.order_digest():
        action["order"] = blueprint.order_digest()
    return action_text({**action, **_how(config)})


#: Settings by which a run may train from its first step on as no run does without them.
FROM_START = ("norm_statistics", "lr_factor")


def acts_from_start(config: TrialConfig) -> dict[str, Any]:
    """Return those of `FROM_START` that a run has, with their values."""
    if not config.skips_gradients:
        return {}
    settings = config.gradskip_settings()
    norms = {"norm_statistics": "hold_all"} if settings.norm_statistics == "hold_all" else {}
    return norms | ({"lr_factor": float(settings.lr_factor)} if settings.lr_factor != 1 else {})


def _how(config: TrialConfig) -> dict[str, Any]:
    """Return the other settings that a stop's effect depends on, where they are not the default."""
    settings = config.gradskip_settings()
    named = {
        "norm_statistics": ("go_on" if settings.norm_statistics == "hold_all" else settings.norm_statistics, "go_on"),
        "prefix_autograd": (settings.prefix_autograd, True),
        "prefix_mode": (settings.prefix_mode, "train"),
        "forward_cache_mb": (config.forward_cache_mb, 0),
    }
    return {name: value for name, (value, default) in named.items() if value != default}


class GradskipReplay:
    """Replay of one configuration's machine over recorded signals.

    A rule that scales every step (``freezeout``) sets learning rates from the first one on, so the run shares no step
    with others: one intervention at step 0 contains all settings, and the later stops are not interventions.
    """

    def __init__(self, config: TrialConfig, blueprint: Blueprint) -> None:
        self.config = config
        self.settings = config.gradskip_settings()
        self.blueprint = blueprint
        self.settings.check_layers(len(blueprint.plan.order))
        self.machine: SkipMachine = blueprint.machine(self.settings)
        self.events: list[StopEvent] = []
        self.kind = checkpoint_kind(self.settings)
        self.first_stage_only = config.forward_cache_mb > 0  # a cache's content is in no checkpoint
        self._names = {unit.end: signal_name(self.settings, unit.watched) for unit in blueprint.plan.units}
        rule = NAMED.get(self.settings.mode)
        self._acts_throughout = rule is not None and rule.scales_every_step

    @property
    def iteration(self) -> int:
        return self.machine.iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        machine = self.machine
        if self._acts_throughout and machine.iteration == 0 < until:
            self._step(recorded)
            settings = {k: v for k, v in asdict(self.settings).items() if k.startswith(("rule", "watch", "whole"))}
            return Intervention(iteration=0, action=action_text({**settings, **_how(self.config)}))
        if (first := machine.before_first) is not None and machine.iteration == 0 < until:
            self.events.append(self.blueprint.event(-1, first, self.settings))
            self._step(recorded)
            through = machine.decided_through
            action = stop_action(self.config, self.blueprint, through, machine.distance, at_once=first.layer)
            return Intervention(iteration=0, action=action)
        while machine.iteration < until:
            due = machine.quiet_until()
            if due > machine.iteration:
                machine.iteration = min(due, until)
                continue
            decision = self._step(recorded)
            if decision is not None and not self._acts_throughout:
                return Intervention(
                    iteration=machine.iteration - 1,
                    action=stop_action(self.config, self.blueprint, decision.layer, machine.distance),
                )
        return None

    def _step(self, recorded: Recorded) -> Decision | None:
        machine = self.machine
        before = machine.state_dict()
        try:
            plan = machine.step(lambda position: recorded.at(self._names[position], before["iteration"]))
        except MissingSignal:
            machine.load_state_dict(before)
            raise
        if plan.decision is not None:
            self.events.append(self.blueprint.event(before["iteration"], plan.decision, self.settings))
        return plan.decision

    def is_quiet(self) -> bool:
        acts = self._acts_throughout or (self.machine.before_first is not None and self.machine.iteration == 0)
        return self.machine.quiet_until() > self.machine.iteration and not acts

    def columns(self) -> dict[str, Any]:
        return columns(self.machine.stopped_through, self.events)

    def state_dict(self) -> dict[str, Any]:
        return {"machine": self.machine.state_dict(), "events": [dict(vars(event)) for event in self.events]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.machine.load_state_dict(state["machine"])
        self.events = [StopEvent(**event) for event in state["events"]]


def columns(stopped_through: int, events: Sequence[StopEvent]) -> dict[str, Any]:
    """Return Gradient-Skip's result columns."""
    return {"stopped_through": stopped_through, "stop_events": json.dumps([asdict(event) for event in events])}


# --- Joint replay of Gradient-Skip and a method whose acts are known, over recorded training --------------------------
# Gradient-Skip decides by the weights after the previous step; the other method acts later in the step. So both use the
# same state, and if both act in one step, it is one intervention.


class KnownActs(MethodReplay, Protocol):
    """A replay that can say when it acts next."""

    iteration: int

    def next_action(self) -> int | None:
        """Return the iteration of the next intervention; None if there is none."""


class JointReplay:
    """Both replays, always at the same iteration; ``name`` is that of the other method in states."""

    def __init__(self, gradskip: MethodReplay, other: KnownActs, name: str) -> None:
        self.gradskip, self.other, self._name = gradskip, other, name
        self.kind = self.gradskip.kind
        self.first_stage_only = self.gradskip.first_stage_only

    @property
    def iteration(self) -> int:
        return self.gradskip.iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        while self.iteration < until:
            acts = self.other.next_action()
            # Before the step in which the other acts, only Gradient-Skip is replayed; in that step both are.
            end = until if acts is None else min(until, max(acts, self.iteration + 1))
            if acts == self.iteration:
                before = self.gradskip.state_dict()
                try:
                    stop = self.gradskip.advance(recorded, acts + 1)
                    act = self.other.advance(recorded, acts + 1)
                except BaseException:
                    self.gradskip.load_state_dict(before)
                    raise
                assert act is not None
                return act if stop is None else _both(act, stop)
            try:
                stop = self.gradskip.advance(recorded, end)
            finally:
                self.other.iteration = self.gradskip.iteration
            if stop is not None:
                return stop
        return None

    def is_quiet(self) -> bool:
        return self.gradskip.is_quiet() and self.other.is_quiet()

    def columns(self) -> dict[str, Any]:
        return self.gradskip.columns()

    def state_dict(self) -> dict[str, Any]:
        return {**self.gradskip.state_dict(), self._name: self.other.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gradskip.load_state_dict(state)
        self.other.load_state_dict(state[self._name])


def _both(act: Intervention, stop: Intervention) -> Intervention:
    return Intervention(
        iteration=act.iteration, action=action_text({**json.loads(act.action), **json.loads(stop.action)})
    )
