"""Gradient-Skip attached to a torch optimizer: combines numbering, stops, decisions, step and advice."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.attachment import Attached, EstimateFlops, RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip import saved_state
from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.advice.input_gradients import InputGradientCheck
from trainables.gradskip.advice.occasions import advise_after_stop, advise_at_begin
from trainables.gradskip.execution_order import ForwardHook
from trainables.gradskip.layers import unwrap, wrappers
from trainables.gradskip.numbering import ExampleTrace, Numbering, as_forward, is_compiled
from trainables.gradskip.replay import columns
from trainables.gradskip.script_counting.trace_file import TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import PlasticitySignal
from trainables.gradskip.step import Status, Step
from trainables.gradskip.stops import Decisions, Stops
from trainables.gradskip.variables import RULES

# --- Checks that refuse optimizers and settings that do not work with Gradient-Skip, before anything is attached ------


def check_attachable(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer whose step Gradient-Skip cannot surround."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "Gradient-Skip needs an optimizer that leaves parameters without gradient alone, got LBFGS, which "
            "moves all parameters together: use SGD, Adam, AdamW or another first-order one"
        )
    if hasattr(optimizer, "gradskip"):
        raise UserError("this optimizer has Gradient-Skip already: wrap it once")
    inner = _inner_optimizer(optimizer)
    if inner is not None:
        raise UserError(
            f"Gradient-Skip needs the optimizer that moves the parameters, got {type(optimizer).__name__} around "
            f"{type(inner).__name__}: wrap the inner one first, as in {type(optimizer).__name__}(gradskip.wrap(...))"
        )
    try:
        optimizer.register_state_dict_pre_hook(lambda _: None).remove()
    except AttributeError:
        raise UserError(
            f"Gradient-Skip needs an optimizer with torch's hooks, got {type(optimizer).__name__}, which does not call "
            "torch.optim.Optimizer.__init__: have it call that, or wrap the optimizer that it is built around"
        ) from None


def _inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that this one is built around, such as that of Lookahead or of accelerate."""
    held: list[Any] = []
    for value in vars(optimizer).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return next((value for value in held if isinstance(value, Optimizer) and value is not optimizer), None)


def check_model(settings: Settings, model: nn.Module | None, optimizer: Optimizer) -> None:
    """Raise UserError for settings that need a model where none is given, or an unsharded one where it is sharded."""
    for field, wanted in (
        ("norm_statistics", settings.norm_statistics == "hold"),
        ("prefix_autograd", not settings.prefix_autograd),
        ("rule", settings.mode == "plasticity"),
    ):
        if wanted and model is None:
            value = getattr(settings, field)
            text = int(value) if isinstance(value, bool) else value
            raise UserError(f"CAC_{field.upper()}={text} looks into the model: give model=")
    if settings.mode == "plasticity" and any(
        hasattr(p, "full_tensor") for group in optimizer.param_groups for p in group["params"]
    ):
        raise UserError(
            "CAC_RULE must not be plasticity for a sharded model (fully_shard), whose weights no copy can stand in "
            f"for: use one of {', '.join(rule for rule in RULES if rule != 'plasticity')}"
        )


# --- Gradient-Skip and another method on one training run -------------------------------------------------------------

#: Rules that decide by weights only, which the other method does not change within a step.
WEIGHT_RULES = ("off", "auto", "manual")


class GradskipBeside(Attached):
    """Both methods; Gradient-Skip decides by the weights after the previous step.

    Args:
        skip: Gradient-Skip.
        other: the other method.
        name: of the other method, in states.
    """

    def __init__(self, skip: AttachedGradientSkip, other: Attached, name: str) -> None:
        self.skip, self.other, self._name = skip, other, name
        self.gradskip = skip.gradskip
        self.replaces_schedule = other.replaces_schedule

    def stop_key(self) -> Hashable:
        return (self.skip.stop_key(), self.other.stop_key())

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self.gradskip.look_ahead()
        self.other.begin_step(epoch, minibatch)

    def batch(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.other.batch(batch)

    def forward_pass(self) -> AbstractContextManager[Any]:
        return self.other.forward_pass()

    def loss(self, loss: Tensor) -> Tensor:
        return self.other.loss(loss)

    def estimate(self, loss: Callable[[nn.Module], Tensor], batch: tuple[Tensor, ...]) -> EstimateFlops | None:
        return self.other.estimate(loss, batch)

    def gradient_method(self) -> Any:
        return self.other.gradient_method()

    def before_optimizer(self) -> None:
        self.other.before_optimizer()

    def end_step(self) -> None:
        self.other.end_step()

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.other.end_epoch(metrics)

    def watched_layers(self) -> list[tuple[int, ...]]:
        return self.skip.watched_layers()

    def events(self) -> list[dict[str, Any]]:
        return self.skip.events()

    def columns(self) -> dict[str, Any]:
        return self.skip.columns()

    def measured(self) -> dict[str, Any]:
        return self.other.measured()

    def runs_beside(self) -> Sequence[nn.Module]:
        return self.other.runs_beside()

    def model_metadata(self) -> dict[str, Any]:
        return {"gradskip": self.skip.model_metadata(), self._name: self.other.model_metadata()}

    def state_dict(self) -> dict[str, Any]:
        # Gradient-Skip's state is in the optimizer's state.
        return {
            "decision_state": {self._name: self.other.decision_state()},
            "training_state": self.other.training_state(),
        }

    def training_state(self) -> dict[str, Any]:
        return {**self.skip.training_state(), **self.other.training_state()}

    def decision_state(self) -> dict[str, Any]:
        return {**self.skip.decision_state(), self._name: self.other.decision_state()}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        self.other.prepare_structure(training_state)

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        if "machine" in decision_state:
            self.skip.resume({name: decision_state[name] for name in ("machine", "events")}, training_state)
        self.other.resume(decision_state[self._name], training_state)


# --- Gradient-Skip attached to a torch optimizer ----------------------------------------------------------------------

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


# --- Gradient-Skip as a method of a trial -----------------------------------------------------------------------------


class AttachedGradientSkip(Attached):
    """Gradient-Skip attached to one training run."""

    def __init__(self, gradskip: GradientSkip) -> None:
        self.gradskip = gradskip

    def stop_key(self) -> Hashable:
        return self.gradskip.stopped_through

    def watched_layers(self) -> list[tuple[int, ...]]:
        return [unit.watched for unit in self.gradskip.plan.units]

    def columns(self) -> dict[str, Any]:
        return columns(self.gradskip.stopped_through, self.gradskip.events)

    def model_metadata(self) -> dict[str, Any]:
        return self.gradskip.blueprint.to_dict()

    def training_state(self) -> dict[str, Any]:
        state = self.gradskip.state_dict()
        return {"signal": state["signal"], "stops": state["stops"]}

    def decision_state(self) -> dict[str, Any]:
        return {"machine": self.gradskip.machine.state_dict(), "events": self.events()}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        fresh = self.gradskip.state_dict()
        self.gradskip.load_state_dict(
            {**fresh, **{k: training_state[k] for k in training_state if k in fresh}, **decision_state}
        )

    def events(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.gradskip.events]


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> AttachedGradientSkip:
    """Attach Gradient-Skip with the config's settings; the environment is not read."""
    with warnings.catch_warnings():
        # A search may try settings that stop nothing; its table shows that they did.
        warnings.filterwarnings("ignore", message="Gradient-Skip (will|may) stop nothing")
        return AttachedGradientSkip(
            GradientSkip(
                optimizer,
                config.gradskip_settings(),
                model=run.model,
                example_inputs=run.forward,
                total_steps=run.total_steps,
            )
        )
