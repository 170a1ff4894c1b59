"""The rule on a real model: when it is asked, what is measured for it, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.layer_plan import Blueprint, LayerPlan, StopEvent, Unit
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.rules.state_machine import SkipMachine, StepPlan
from trainables.gradskip.rules.stop_rule import NEVER
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import (
    GradientNormSignal,
    PlasticitySignal,
    Signal,
    VarianceSignal,
)
from trainables.gradskip.stops import Stops
from trainables.gradskip.variables import MEASURED_RULES


class Decisions:
    """A rule, its machine and its signal over the layers that the user trains.

    Args:
        optimizer: its learning rates are stored for the published braking.
        settings: of the rule.
        advice: warns of weights that contain a NaN.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings, advice: Advice) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._advice = advice
        self.events: list[StopEvent] = []
        self.learning_rates: list[Any] = []
        """Learning rates of the groups at the last decision, which the published braking multiplies."""
        self.process_group: Any = None
        """Processes that decide together."""
        self.on_measured: list[Callable[[Unit, float], None]] = []
        self._measured: dict[int, float] = {}  # this step's, by position
        self._ahead: dict[int, float] = {}  # of the coming step, measured before it

    def begin(self, numbering: Numbering, stops: Stops, ends: Collection[int] | None = None) -> None:
        """Use the layers of a numbering, with a rule in its initial state.

        Args:
            numbering: of the parameters.
            stops: of the parameters.
            ends: positions at which the layers end that a saved run watched last. Layers that the user trains now are
                added at the next decision, as in that run.
        """
        self._numbering, self._stops = numbering, stops
        self._user_changes = self._stops.user_changes if ends is None else -1
        self._measured, self._ahead = {}, {}
        self.signal = self._make_signal()
        self._set_plan(self._numbering.plan(self._counts if ends is None else lambda unit: unit.end in ends))

    def _set_plan(self, plan: LayerPlan) -> None:
        """Use a plan, with a machine in its initial state."""
        stoppable = plan.units if self._settings.reference else plan.without_last(self._stops.user_trains)
        numbering = self._numbering
        self.blueprint = Blueprint(
            plan=plan,
            stoppable=len(stoppable),
            names=None if numbering.names is None else tuple(numbering.names),
            single_precision=not any(p.dtype == torch.float64 for p in numbering.parameters),
        )
        self.machine: SkipMachine = self.blueprint.machine(self._settings)
        self._unit_at: dict[int, Unit] = {unit.end: unit for unit in plan.units}

    def _counts(self, unit: Unit) -> bool:
        """Return whether a rule may watch a layer: the user trains it, and a variance has more than one element."""
        if self._settings.reference:
            return True
        parameters = self._numbering.parameters
        needs_variance = self._settings.mode == "auto"
        return any(
            self._stops.user_trains(n) and not (needs_variance and parameters[n].numel() <= 1) for n in unit.watched
        )

    def _make_signal(self) -> Signal:
        parameters, model = self._numbering.parameters, self._numbering.model
        if self._settings.mode == "gradient_norm":
            return GradientNormSignal(parameters)
        if self._settings.mode == "plasticity":
            assert isinstance(model, nn.Module)
            return PlasticitySignal(parameters, model)
        return VarianceSignal(parameters, reference=self._settings.reference)

    @property
    def plan(self) -> LayerPlan:
        """Return the plan: the watched layers, and the order in which parameters stop."""
        return self.blueprint.plan

    def running_units(self) -> list[Unit]:
        """Return the layers that no stop has reached."""
        return [unit for unit in self.plan.units if unit.end > self.machine.stopped_through]

    # --- what the user freezes and unfreezes ------------------------------------------------------------------------

    def look_due(self) -> int:
        """Return the first iteration with anything to do, including a check of what the user has frozen."""
        machine, settings = self.machine, self._settings
        due = machine.quiet_until()
        if settings.reference or settings.mode in ("off", "manual") or not self._stops.user_holds:
            return due
        # A rule with no layer left makes no decisions, but must notice layers that the user unfreezes.
        begin, interval = settings.looks
        begin = max(begin, machine.iteration)
        return min(due, -(-begin // interval) * interval)

    def follow_user(self) -> bool:
        """Update the rule's layers to those that the user trains now; return whether the user has changed any.

        If the layer that the rule was examining was frozen, the rule continues with the next one. It returns to a layer
        after the last stop that was unfrozen.
        """
        self._stops.look_at_user()
        if self._settings.reference or self._stops.user_changes == self._user_changes:
            return False
        self._user_changes = self._stops.user_changes
        if self._settings.mode == "manual":  # examines no layer
            return True
        # A schedule sets every layer's time at the start; freezing another layer later does not change it.
        kept = self.plan.units if self._settings.mode in ("linear", "freezeout") else ()
        self.replan(self._numbering.plan(lambda unit: unit in kept or self._counts(unit)))
        return True

    def replan(self, plan: LayerPlan) -> None:
        """Continue with the same rule over other layers."""
        state = self.machine.state_dict()
        self._set_plan(plan)
        empty = not state["rule"] or not self.machine.rule.state_dict()  # no layer: a rule that does nothing
        self.machine.load_state_dict({**state, "rule": self.machine.rule.state_dict() if empty else state["rule"]})
        self.machine.rule.begin_after(self.machine.decided_through)

    def follow(self) -> None:
        """Measure and judge anew, because watched parameters have another shape; what was decided holds."""
        if self._settings.mode in ("auto", *MEASURED_RULES):
            state = self.machine.state_dict()
            self.begin(self._numbering, self._stops)
            self.machine.load_state_dict({**state, "rule": self.machine.rule.state_dict()})
            self.machine.rule.begin_after(self.machine.decided_through)

    # --- a decision -------------------------------------------------------------------------------------------------

    def look_ahead(self, due: int) -> None:
        """Measure now what the next step's decision needs; only for signals of weights alone."""
        if isinstance(self.signal, VarianceSignal) and self.machine.iteration >= due:
            units = self.running_units()
            if units:
                self._ahead = dict(zip([unit.end for unit in units], self._measure(units), strict=True))

    def decide(self) -> StepPlan:
        """Begin a step in which the rule may decide or a layer brakes; return what to stop and how to scale updates."""
        machine = self.machine
        iteration = machine.iteration
        looks = machine.braking_through < 0 and machine.rule.next_due(iteration) == iteration
        self._measured, self._ahead = self._ahead, {}
        plan = machine.step(self._signal_of)
        if looks:
            self.signal.measured()
            if passed := getattr(machine.rule, "passed", ()):
                self._advice.passed_over([self._numbering.name(self._unit_at[end].number) for end in passed])
        if plan.decision is not None:
            self.events.append(self.blueprint.event(iteration, plan.decision, self._settings))
            groups = self._optimizer.param_groups
            self.learning_rates = [_plain(group["lr"]) for group in groups if "lr" in group]
        return plan

    def _signal_of(self, position: int) -> float:
        if position not in self._measured:
            asked = self.running_units() if self.signal.together else [self._unit_at[position]]
            self._measured.update(zip([unit.end for unit in asked], self._measure(asked), strict=True))
        return self._measured[position]

    def _measure(self, units: Sequence[Unit]) -> list[float]:
        values = self.signal.measure(units)
        if self.process_group is not None:
            # All processes use the first one's numbers, so that rounding cannot stop a layer on some of them only.
            values = values.detach().clone()
            source = torch.distributed.get_global_rank(self.process_group, 0)
            torch.distributed.broadcast(values, source, group=self.process_group)
        numbers: list[float] = [float(values)] if len(values) == 1 else values.tolist()  # waits for the device
        for unit, number in zip(units, numbers, strict=True):
            for told in self.on_measured:
                told(unit, number)
            if math.isnan(number) and isinstance(self.signal, VarianceSignal):
                self._advice.nan(self._numbering.name(unit.number))
        return numbers

    def can_stop_more(self) -> bool:
        """Return whether any stop may still come."""
        return self.machine.braking_through >= 0 or self.machine.rule.next_due(self.machine.iteration) != NEVER


def _plain(lr: Any) -> Any:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr
