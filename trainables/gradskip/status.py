"""Read the state of an optimizer's Gradient-Skip, for users and the rest of the package."""

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
    """The readings of `GradientSkip`: each comes from the one part that owns it."""

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
        """By number."""
        return self.numbering.parameters

    @property
    def names(self) -> list[str] | None:
        """Of the parameters, where known."""
        return self.numbering.names

    @property
    def events(self) -> list[StopEvent]:
        """Every stop decision so far."""
        return self.decisions.events

    @property
    def machine(self) -> SkipMachine:
        """The machine that counts iterations, asks the rule and brakes."""
        return self.decisions.machine

    @property
    def blueprint(self) -> Blueprint:
        """The model's contribution to the rule."""
        return self.decisions.blueprint

    @property
    def plan(self) -> LayerPlan:
        """The layers that are watched, and the order in which parameters stop."""
        return self.decisions.plan

    @property
    def stopped_through(self) -> int:
        """Position of the last parameter that the rule has stopped; its number, unless whole units stop. -1: none."""
        return self.machine.stopped_through

    @property
    def stopped(self) -> tuple[int, ...]:
        """Numbers of the parameters that Gradient-Skip has stopped, ascending; those of `stops` with the reasons."""
        return self.stops.numbers

    @property
    def iteration(self) -> int:
        """Optimizer steps so far that were really taken."""
        self.step.settle()
        return self.machine.iteration

    def left_upstream(self) -> list[str]:
        """Names of parameters that still train and whose gradients pass through stopped layers.

        Each of them makes the backward pass run on through the layers that are stopped. Empty where the execution
        order is not known, because no model was given or no training step has run.
        """
        return [self.numbering.name(n) for n in self.stops.left_upstream()]

    @property
    def on_measured(self) -> list[Callable[[Unit, float], None]]:
        """Called with every number that was measured for a decision."""
        return self.decisions.on_measured

    @property
    def process_group(self) -> Any:
        """The processes that decide as one; set by `DistributedDataParallel`."""
        return self.decisions.process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self.decisions.process_group = group

    def look_ahead(self) -> None:
        """Measure now what the coming step's decision will look at: something else changes weights within the step.

        For signals of weights alone. Without this a decision looks at the weights in the optimizer's step, which are
        the same where nothing else changes them.
        """
        self.decisions.look_ahead(self.step.due)
