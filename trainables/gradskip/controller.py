"""Gradient-Skip attached to a torch optimizer, and as the method of a trial."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from trainables.attachment import Attached, RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.execution_order import ModelTrace
from trainables.gradskip.forward_cache import CachedBatches, ForwardCache
from trainables.gradskip.layers import wrappers
from trainables.gradskip.nothing_stops import never_fires, weight_decays
from trainables.gradskip.replay import StopEvent, columns
from trainables.gradskip.script_counting.trace_file import TRIAL_FOLDER
from trainables.gradskip.settings import Settings
from trainables.gradskip.step import SkippingStep
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
    outer = type(optimizer).__name__
    held: list[tuple[str, Any]] = []
    for name, value in vars(optimizer).items():
        held += [(name, one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    for name, inner in held:
        if isinstance(inner, Optimizer) and inner is not optimizer:
            raise UserError(
                f"Gradient-Skip needs the optimizer that moves the parameters, got {outer} around "
                f"{type(inner).__name__}: wrap the inner one, as in {outer}(gradskip.wrap(...)), or {outer}'s {name}"
            )


def check_model(settings: Settings, model: nn.Module | None, optimizer: Optimizer) -> None:
    """Raise UserError for settings that need a model where none is given, or an unsharded one where it is sharded."""
    needed = {
        f"NORM_STATISTICS={settings.norm_statistics}": settings.norm_statistics != "go_on",
        "PREFIX_AUTOGRAD=0": not settings.prefix_autograd,
        "PREFIX_MODE=eval": settings.prefix_mode == "eval",
        "RULE=plasticity": settings.mode == "plasticity",
    }
    for setting, is_set in needed.items():
        if is_set and model is None:
            raise UserError(f"CAC_{setting} looks into the model: give model=")
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
    """Gradient-Skip, which decides by the weights after the previous step, and another method, named in states."""

    def __init__(self, skip: AttachedGradientSkip, other: Attached, name: str) -> None:
        self.skip, self.other, self._name = skip, other, name
        self.gradskip = skip.gradskip
        self.replaces_schedule = other.replaces_schedule
        for call in (
            "batch", "forward_pass", "loss", "estimate", "gradient_method", "before_optimizer", "end_step",
            "end_epoch", "measured", "runs_beside", "prepare_structure",
        ):  # fmt: skip
            setattr(self, call, getattr(other, call))
        for call in ("watched_layers", "events", "columns"):
            setattr(self, call, getattr(skip, call))

    def stop_key(self) -> Hashable:
        return (self.skip.stop_key(), self.other.stop_key())

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self.gradskip.look_ahead()
        self.other.begin_step(epoch, minibatch)

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

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        if "machine" in decision_state:
            self.skip.resume({name: decision_state[name] for name in ("machine", "events")}, training_state)
        self.other.resume(decision_state[self._name], training_state)


# --- Gradient-Skip attached to a torch optimizer ----------------------------------------------------------------------

#: Key of the rule's state in an optimizer's ``state_dict()``.
STATE_KEY = "gradskip"


class GradientSkip(SkippingStep):
    """State and control of Gradient-Skip on one optimizer; see `SkippingStep` for its attributes.

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
        named_in: a module around the model, in whose names events and records are; None for the model's own.

    Raises:
        UserError: invalid settings, a layer number past the last parameter, a model of other parameters, an optimizer
            that mixes parameters (LBFGS) or wraps another, one that has Gradient-Skip already, or a setting that needs
            a model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings | None = None,
        *,
        model: nn.Module | None = None,
        example_inputs: Any = None,
        total_steps: int | None = None,
        named_in: nn.Module | None = None,
    ) -> None:
        check_attachable(optimizer)
        settings = Settings.from_environment() if settings is None else settings
        check_model(settings, model, optimizer)
        super().__init__(optimizer, settings, model, example_inputs, named_in)
        self._pending: dict[str, Any] | None = None
        self._cache: ForwardCache | None = None
        self._advise_at_begin(total_steps)
        self._record_first_pass()
        if settings.mode == "plasticity" and model is not None:
            self._input_hook.watch(*wrappers(model))
        self._install()
        optimizer.register_state_dict_pre_hook(lambda _: self._set_groups(self._outside))  # also within a step
        optimizer.register_state_dict_post_hook(self._add_state)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._remember(state))
        optimizer.register_load_state_dict_post_hook(lambda _: self._load_pending())
        if os.environ.get(TRIAL_FOLDER):
            from trainables.gradskip.script_counting.process_record import start

            self.step_record = start(self, model)

    def _advise_at_begin(self, total_steps: int | None) -> None:
        """Warn of groups without a model, and of settings that can stop nothing."""
        settings, groups, model = self.settings, self.optimizer.param_groups, self._given_model
        if len(groups) > 1 and model is None and settings.mode != "off":
            self.advice.say("groups", count=len(groups))
        reason = never_fires(
            settings,
            units=len(self.plan.units),
            stoppable=self.blueprint.stoppable,
            first_stop=self.machine.rule.first_stop(),
            decays=weight_decays(self.optimizer),
            total_steps=total_steps,
            frozen=len(self.numbering.plan(lambda _: True).units) - len(self.plan.units),
        )
        if reason is not None:
            self.advice.say("never", reason=reason)

    def cache(self, batches: Iterable[Any], *, budget_bytes: int | None = None) -> CachedBatches:
        """Return the batches, in a loop over which the model reads outputs of a stopped prefix.

        See `ForwardCache`; one of them serves all loops, over training and evaluation data.

        Args:
            batches: of an epoch, such as a DataLoader; batches stay as they are.
            budget_bytes: of the cache, >= 0; the first call's counts. None: a fifth of the memory that is free then.

        Raises:
            UserError: for an optimizer without ``model=`` and as `ForwardCache`.
        """
        if self._cache is None:
            if self._given_model is None:
                raise UserError("gradskip.cache keeps outputs of the model: give the optimizer model=")
            if budget_bytes is None:
                budget_bytes = psutil.virtual_memory().available // 5
            self._cache = ForwardCache(self._given_model, budget_bytes=budget_bytes)
            if self.step_record is not None:
                self._cache.on_pass = self.step_record.note_pass
        return CachedBatches(self._cache, batches)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's complete state in plain types and tensors (for ``torch.load(weights_only=True)``)."""
        self.stops.look_at_user()
        trace = self.numbering.trace
        counted = {} if self.step_record is None else {"step_record": self.step_record.state_dict()}
        return {
            **counted,
            "machine": self.machine.state_dict(),
            "events": [asdict(event) for event in self.events],
            "decision_lrs": list(self.learning_rates),
            "signal": self.signal.state_dict(),
            "rule": rule_identity(self.settings),
            "stops": {**self.stops.state_dict(), "through": self.machine.stopped_through},
            "trace": None if trace is None else trace.state_dict(),
            "order": list(self.numbering.order),
            "units": [unit.end for unit in self.plan.units],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: iteration, peaks, braking; parameters stop or train again accordingly.

        Thresholds and intervals may be others. UserError for a state of other parameters, another rule, other layers,
        or another version.
        """
        self._check_state(state)
        before = [p.requires_grad for p in self.parameters]
        self._earlier = []
        self._forget_step()
        self._load(state)
        self._tell_of_change(before)
        self.refresh()

    def state_bytes(self) -> bytes:
        """Return the state as one value, for `torch.distributed.checkpoint`, which loads only keys that are there."""
        torch.save(self.state_dict(), buffer := io.BytesIO())
        return buffer.getvalue()

    def load_state_bytes(self, state: bytes) -> None:
        """Continue from `state_bytes`; UserError as `load_state_dict`."""
        self.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))

    def _check_state(self, state: dict[str, Any]) -> None:
        if "reasons" not in state.get("stops", ()):
            raise UserError(
                "the state to load is of another version of Gradient-Skip: train on with that version, or load torch's "
                "part alone by taking the entry 'gradskip' out of it"
            )
        if len(state["order"]) != len(self.parameters):
            raise UserError(
                f"the state to load is of {len(state['order'])} parameters, but this optimizer has "
                f"{len(self.parameters)}: load it into the model that it was saved from"
            )
        for name, asked in rule_identity(self.settings).items():
            if (saved := state["rule"].get(name, asked)) != asked:  # an older version did not save all of them
                raise UserError(
                    f"the state to load is of {name}={saved} and the settings ask for {asked}: train on "
                    "with those, or take the entry 'gradskip' out of it, and the rule begins anew"
                )

    def _load(self, state: dict[str, Any]) -> None:
        numbering, stops = self.numbering, self.stops
        if self.step_record is not None and "step_record" in state:
            self.step_record.load_state_dict(state["step_record"])
        if state["trace"] is not None:
            numbering.stop_recording()
            numbering.trace = ModelTrace.from_state(state["trace"])  # a resumed run has been traced already
        machine = state["machine"]
        if machine["iteration"] == 0:  # perhaps saved before the trace, which gives the order
            numbering.order_by_trace()
        else:
            numbering.order = tuple(state["order"])
        stopped = numbering.order[state["stops"]["through"] + 1 : machine["stopped_through"] + 1]
        stops.load_state_dict(state["stops"], stopped)
        self.begin_rule(set(state["units"]))
        self.machine.load_state_dict(machine)
        self.signal.load_state_dict(state["signal"])
        self.machine.rule.begin_after(self.machine.decided_through)  # where the user trains other layers now
        self.events[:] = [StopEvent(**event) for event in state["events"]]
        self.learning_rates = list(state["decision_lrs"])

    def _add_state(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self._set_groups(self._inside)
        return {**state, STATE_KEY: self.state_dict()}

    def _remember(self, state: dict[str, Any]) -> None:
        pending = state.get(STATE_KEY)
        if pending is not None:
            self._check_state(pending)  # before torch loads its part
        self._forget_step()
        self._pending = pending

    def _load_pending(self) -> None:
        # A state without ours (saved by torch's own optimizer) leaves the rule unchanged.
        if self._pending is not None:
            self.load_state_dict(self._pending)
        self._pending = None


def rule_identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that a rule's own state, or the learning rates, depend on, in plain types.

    With equal ones a training can continue.
    """
    names = ("watch", "whole_units", "stop_layer_num", "stop_layer_itr", "lr_factor")
    values = {name: getattr(settings, name) for name in names}
    return {"mode": settings.mode, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}


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
