"""Gradient-Skip attached to a torch optimizer: combines numbering, stops, decisions, step and advice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainables.gradskip import saved_state
from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.advice.input_gradients import InputGradientCheck
from trainables.gradskip.advice.occasions import advise_after_stop, advise_at_begin
from trainables.gradskip.attachable import check_attachable, check_model
from trainables.gradskip.execution_order import ForwardHook
from trainables.gradskip.layers import unwrap, wrappers
from trainables.gradskip.numbering import ExampleTrace, Numbering, as_forward, is_compiled
from trainables.gradskip.script_counting.trace_file import TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import PlasticitySignal
from trainables.gradskip.step import Status, Step
from trainables.gradskip.stops import Decisions, Stops

#: Key of the rule's state in an optimizer's ``state_dict()``.
STATE_KEY = "gradskip"


class GradientSkip(Status):
    """State and control of Gradient-Skip on one optimizer.

    Args:
        optimizer: any torch optimizer that does not change parameters without a gradient (all of torch's but LBFGS).
        settings: None reads the ``CAC_*`` variables now.
        model: owner of the parameters. Defines the numbering (the order of its ``parameters()``, whatever the groups
            are), names, whole units, and the check for parameters that still train before stopped layers.
            Data-parallel and compiled wrappers are removed.
        example_inputs: inputs with which a copy of the model is run at construction, to record its execution order: a
            tensor or tuple of positional inputs, or a function that runs the model it is given. None records the
            first training forward pass, which `torch.compile` hides: layers of a compiled model then stop in the
            order of registration.
        total_steps: length of the run in optimizer steps, used only to warn of settings that can never fire in it.

    Attributes:
        settings: as given.
        stops: the stopped and frozen parameters, with reasons.

    Raises:
        UserError: invalid settings, a layer number past the last parameter, a parameter in two groups, no parameter,
            an optimizer that mixes parameters (LBFGS) or wraps another, one that has Gradient-Skip already, or a
            setting that needs a model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings | None = None,
        *,
        model: nn.Module | None = None,
        example_inputs: Any = None,
        total_steps: int | None = None,
    ) -> None:
        check_attachable(optimizer)
        self.optimizer = optimizer
        self.settings = Settings.from_environment() if settings is None else settings
        check_model(self.settings, model, optimizer)
        self.model = None if model is None else unwrap(model)
        """The model without wrappers, if it was given."""
        self.on_stop: list[Callable[[], None]] = []
        """Called after the set of parameters that need a gradient has changed."""
        self.step_record: Any = None
        """Record of the steps' cost in a script that a search runs, else None."""
        self.advice = Advice(self.settings)
        self.decisions = Decisions(optimizer, self.settings, self.advice)
        self.step = Step(optimizer, self.decisions, self.settings, self.advice, self._stop, self._follow)
        self._given_model = model
        self._example_given = example_inputs is not None
        self._example: ExampleTrace | None = None
        if self._example_given:
            forward = as_forward(example_inputs)
            if self.model is not None and self.settings.mode != "off":
                self._example = ExampleTrace(self.model, forward)
        self._input_check = InputGradientCheck(self.advice.input_needs_gradient)
        self._input_hook = ForwardHook(self._take_inputs)
        self._pending: dict[str, Any] | None = None
        self._earlier: tuple[list[str], int] | None = None
        self._number()
        advise_at_begin(
            self.advice, self.settings, optimizer, self.numbering, self.decisions, given_model=model,
            total_steps=total_steps,
        )  # fmt: skip
        self._attach()

    def _number(self) -> None:
        numbering = self.numbering = Numbering(self.optimizer.param_groups, self.model, self.settings)
        numbering.on_trace = self._take_trace
        self.stops = Stops(self.optimizer, numbering, self.settings)
        if self._example is not None and numbering.wants_trace:
            numbering.trace = self._example.of(numbering.parameters)
            numbering.order_by_trace()
        if self.stops.switched_on or self.stops.left_off:
            self._earlier = ([numbering.name(n) for n in self.stops.switched_on], self.stops.left_off)
            self.step.once.append(self._tell_of_earlier)
        self.decisions.begin(numbering, self.stops)
        self.step.bind(numbering, self.stops)

    def _attach(self) -> None:
        optimizer, model = self.optimizer, self._given_model
        self._record_first_pass()
        if self.settings.mode == "plasticity" and model is not None:
            self._input_hook.watch(*wrappers(model))
        self.step.install()
        optimizer.register_state_dict_pre_hook(lambda _: self.step.groups.suspend())  # also within a step
        optimizer.register_state_dict_post_hook(self._add_state)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._remember(state))
        optimizer.register_load_state_dict_post_hook(lambda _: self._load_pending())
        if os.environ.get(TRIAL_FOLDER):
            from trainables.gradskip.script_counting.process_record import start

            self.step_record = start(self, model)

    def _record_first_pass(self) -> None:
        hidden = self._given_model is None or self._example_given or is_compiled(self._given_model)
        if self.numbering.wants_trace and not hidden:
            self.numbering.record_first_pass()
        self.step.refresh()

    def bind(self) -> None:
        """Renumber the optimizer's parameters before the first step, after a group was added."""
        self.numbering.stop_recording()
        self._number()
        self._record_first_pass()

    # --- callbacks --------------------------------------------------------------------------------------------------

    def _take_trace(self) -> None:
        if self.machine.iteration == 0:
            self.numbering.order_by_trace()
            self.decisions.begin(self.numbering, self.stops)
        self.step.refresh()

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signal = self.decisions.signal
        if self.machine.iteration >= self.step.due and isinstance(signal, PlasticitySignal):
            signal.inputs = (args, kwargs)

    def _stop(self, through: int) -> None:
        """Stop the parameters up to a position."""
        before = self._needing_gradients()
        self.stops.stop(self.plan.order[: through + 1])
        self._tell_of_change(before)
        advise_after_stop(
            self.advice, self.numbering, self.stops, example_given=self._example_given,
            joined=self.decisions.process_group is not None,
        )  # fmt: skip
        self._check_inputs()

    def _check_inputs(self) -> None:
        if self.model is None or not self.settings.prefix_autograd or self.stops.all or self.settings.reference:
            return
        assert self._given_model is not None
        self.step.once.append(self._input_check.remove)
        if is_compiled(self._given_model):
            self._input_check.watch_inputs(self._given_model)
        elif self.numbering.trace is not None:
            self._input_check.watch_prefix(self.model, self.parameters, self.stops.reasons, self.numbering.trace)

    def _tell_of_earlier(self) -> None:
        """Warn of what an earlier optimizer had stopped, unless a state was loaded, which says what is stopped."""
        if self._earlier is not None:
            self.advice.earlier_optimizer(*self._earlier)

    def _needing_gradients(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def _tell_of_change(self, before: list[bool]) -> None:
        """Call the `on_stop` callbacks if the set of parameters that need a gradient has changed."""
        if before != self._needing_gradients():
            for told in self.on_stop:
                told()

    def _follow(self) -> None:
        """Continue with the parameters that the optimizer has now."""
        if self.machine.iteration == 0:
            return self.bind()
        reshaped = self.numbering.follow(self.optimizer.param_groups)
        self.stops.follow()
        if reshaped:
            self.decisions.follow()
            self.advice.reshaped(list(map(self.numbering.name, reshaped)))
        for told in self.on_stop:
            told()
        self.step.refresh()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's complete state in plain types and tensors (for ``torch.load(weights_only=True)``)."""
        return saved_state.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: iteration, peaks, braking; parameters stop or train again accordingly.

        Raises:
            UserError: the state is of an optimizer with another number of parameters.
        """
        saved_state.check(self, state)
        before = self._needing_gradients()
        self._earlier = None
        self.step.forget()
        self.step.skipped.forget()
        saved_state.load(self, state)
        self._tell_of_change(before)
        self.step.refresh()
        if self.stops.any:
            self._check_inputs()

    def _add_state(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self.step.groups.resume()
        return {**state, STATE_KEY: self.state_dict()}

    def _remember(self, state: dict[str, Any]) -> None:
        pending = state.get(STATE_KEY)
        if pending is not None:
            saved_state.check(self, pending)  # before torch loads its part
        self.step.forget()
        self._pending = pending

    def _load_pending(self) -> None:
        # A state without ours (saved by torch's own optimizer) leaves the rule unchanged.
        if self._pending is not None:
            self.load_state_dict(self._pending)
        self._pending = None
