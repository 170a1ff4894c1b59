"""Replay of Gradient-Skip over recorded training: the same state machine on recorded signals. Without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainables.config import TrialConfig
from trainables.gradskip.layer_plan import Blueprint, StopEvent
from trainables.gradskip.rules.state_machine import SkipMachine
from trainables.gradskip.rules.stop_rule import Decision
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import MEASURED_RULES
from trainables.interventions import Intervention, MissingSignal, Recorded, action_text


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
    """Return the name under which a rule's signal of a layer is recorded.

    A variance depends on the weights alone; the other signals also depend on when they are measured.
    """
    if settings.mode == "auto":
        return variance_name(watched)
    return f"{settings.mode}/{settings.rule_start_itr}/{settings.rule_interval}:{'+'.join(map(str, watched))}"


def variance_name(watched: Sequence[int]) -> str:
    """Return the name under which the weight variance of a layer is recorded."""
    return f"variance:{'+'.join(map(str, watched))}"


def checkpoint_kind(settings: Settings) -> str:
    """Return the kind of a checkpoint that holds the rule's own measurements (sums over gradients, a lagged copy).

    They cover the layers that this rule watches, and end when none of these is left.
    """
    if settings.mode in MEASURED_RULES:
        layers = hashlib.sha256(repr((settings.watch, settings.whole_units)).encode()).hexdigest()[:8]
        return f"{settings.mode}-{settings.rule_start_itr}-{settings.rule_interval}-{layers}"
    return "any"


def stop_action(config: TrialConfig, blueprint: Blueprint, through: int, braking: int) -> str:
    """Return the action of a stop through a position after ``braking`` iterations, under the config's settings."""
    action: dict[str, Any] = {"stop": blueprint.stopped_numbers(through), "braking": braking}
    if blueprint.order_digest():
        action["order"] = blueprint.order_digest()
    return action_text({**action, **_how(config)})


def _how(config: TrialConfig) -> dict[str, Any]:
    """Return the other settings that a stop's effect depends on, where they are not the default."""
    how: dict[str, Any] = {}
    settings = config.gradskip_settings()
    if settings.norm_statistics != "go_on":
        how["norm_statistics"] = settings.norm_statistics
    if not settings.prefix_autograd:
        how["prefix_autograd"] = False
    if config.forward_cache_mb:
        how["forward_cache_mb"] = config.forward_cache_mb
    return how


class GradskipReplay:
    """Replay of one configuration's machine over recorded signals.

    Under ``freezeout`` the rule sets the learning rates of every step, so the run shares no step with others: one
    intervention at step 0 contains all settings, and the later stops are not interventions.

    Args:
        config: of the run.
        blueprint: of the layers.
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
        self._acts_throughout = self.settings.mode == "freezeout"

    @property
    def iteration(self) -> int:
        return self.machine.iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        machine = self.machine
        if self._acts_throughout and machine.iteration == 0 < until:
            self._step(recorded)
            settings = {k: v for k, v in asdict(self.settings).items() if k.startswith(("rule", "watch", "whole"))}
            return Intervention(iteration=0, action=action_text({**settings, **_how(self.config)}))
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
        return self.machine.quiet_until() > self.machine.iteration and not self._acts_throughout

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
