"""State of an optimizer's Gradient-Skip, for users and the rest of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.decisions import Decisions
from trainables.gradskip.layer_plan import Blueprint, LayerPlan, StopEvent, Unit
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.rules.state_machine import SkipMachine
from trainables.gradskip.settings import Settings
from trainables.gradskip.step import Step
from trainables.gradskip.stops import Stops


class Status:
    """Properties of `GradientSkip`, each read from the part that owns it."""

    optimizer: Optimizer
    settings: Settings
    advice: Advice
    on_stop: list[Callable[[], None]]
    step_record: Any
    numbering: Numbering
    stops: Stops
    decisions: Decisions
    step: Step

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters by number."""
        return self.numbering.parameters

    @property
    def names(self) -> list[str] | None:
        """Return the names of the parameters, where known."""
        return self.numbering.names

    @property
    def events(self) -> list[StopEvent]:
        """Return every stop decision so far."""
        return self.decisions.events

    @property
    def machine(self) -> SkipMachine:
        """Return the machine that counts iterations, asks the rule and brakes."""
        return self.decisions.machine

    @property
    def blueprint(self) -> Blueprint:
        """Return what the rule needs to know of the model."""
        return self.decisions.blueprint

    @property
    def plan(self) -> LayerPlan:
        """Return the plan: the watched layers, and the order in which parameters stop."""
        return self.decisions.plan

    @property
    def stopped_through(self) -> int:
        """Return the position of the last parameter that the rule has stopped, -1 for none.

        The position is the parameter's number, unless whole units stop.
        """
        return self.machine.stopped_through

    @property
    def stopped(self) -> tuple[int, ...]:
        """Return the numbers of the parameters that Gradient-Skip has stopped, ascending; `stops` has the reasons."""
        return self.stops.numbers

    @property
    def iteration(self) -> int:
        """Return the number of optimizer steps that were actually taken so far."""
        self.step.settle()
        return self.machine.iteration

    def left_upstream(self) -> list[str]:
        """Return the names of running parameters whose gradients pass through stopped layers.

        Each of them makes the backward pass continue through the stopped layers. Empty where the execution order is not
        known, because no model was given or no training step has run.
        """
        return [self.numbering.name(n) for n in self.stops.left_upstream()]

    @property
    def on_measured(self) -> list[Callable[[Unit, float], None]]:
        """Return the callbacks that are called with every number measured for a decision."""
        return self.decisions.on_measured

    def look_ahead(self) -> None:
        """Measure now what the next step's decision needs, because other code changes weights within the step.

        Only for signals of weights alone. Without this, a decision measures the weights in the optimizer's step, which
        are the same where nothing else changes them.
        """
        self.decisions.look_ahead(self.step.due)
