"""Gradient-Skip attached to a torch optimizer: what surrounds its own step.

torch's step stays untouched, foreach, fused and capturable paths included. A hook before it asks the state machine
what this step does and arranges for scaled updates; a hook after it puts everything back and lets the stopped
parameters go. With nothing to do the two hooks are a counter and three comparisons.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.blueprint import Blueprint, LayerPlan, StopEvent, Unit
from trainables.gradskip.checks import never_fires
from trainables.gradskip.execution_order import (
    ExecutionRecorder,
    ForwardHook,
    ModelTrace,
    trace_model,
    warn_unseen,
)
from trainables.gradskip.layers import make_plan, numbered, unwrap
from trainables.gradskip.machine import StepPlan
from trainables.gradskip.prefix import PrefixModules
from trainables.gradskip.scaling import MovedBack, is_linear_in_lr, split_groups
from trainables.gradskip.settings import RULES, Settings
from trainables.gradskip.signals import GradientNormSignal, PlasticitySignal, Signal, VarianceSignal

if TYPE_CHECKING:
    from trainables.gradskip.step_record import StepRecord

#: Set for a script that a search runs; what its steps cost is counted then.
TRIAL_FOLDER = "TUNE_CAC_TRIAL_DIR"
#: The key under which an optimizer's ``state_dict()`` carries the rule's state.
STATE_KEY = "gradskip"


class GradientSkip:
    """The record and the control of Gradient-Skip on one optimizer.

    Args:
        optimizer: any torch optimizer that leaves parameters without a gradient alone (all of torch's but LBFGS).
        settings: None reads the ``CAC_*`` variables now.
        model: owner of the parameters. Gives the numbering (its order of ``parameters()``, whatever the groups are),
            names, whole units, and the check of what is left training before stopped layers. Data-parallel and
            compiled wrappers are looked through.
        example_inputs: how to run the model to see its execution order, on a copy and at once: a tensor or tuple of
            positional inputs, or a function of the model that it is given. None records the first training forward
            pass, which `torch.compile` hides: layers of a compiled model then stop in the order of registration.
        total_steps: length of the run, only to warn of settings that can never fire in it.

    Attributes:
        settings: as given.
        events: every stop decision so far, a list of `StopEvent`.
        parameters: by number.
        names: of them, or None.

    Raises:
        UserError: invalid settings, a layer number past the last parameter, a parameter in two groups, no parameter,
            an optimizer that mixes parameters (LBFGS), one that is wrapped already, or a setting that needs a model.
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
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "Gradient-Skip needs an optimizer that leaves parameters without gradient alone, got LBFGS, which "
                "moves all parameters together: use SGD, Adam, AdamW or another first-order one"
            )
        if isinstance(getattr(optimizer, "gradskip", None), GradientSkip):
            raise UserError("this optimizer has Gradient-Skip already: wrap it once")
        self.optimizer = optimizer
        self.settings = Settings.from_environment() if settings is None else settings
        self.events: list[StopEvent] = []
        self.process_group: Any = None
        """The processes that decide as one; set by `DistributedDataParallel`."""
        self.on_stop: list[Callable[[], None]] = []
        """Called after the set of stopped parameters has changed."""
        self.on_measured: list[Callable[[Unit, float], None]] = []
        """Called with every number that was measured for a decision."""
        self._model = None if model is None else unwrap(model)
        self._check_needs_model()
        self._total_steps = total_steps
        self._recorder: ExecutionRecorder | None = None
        self._input_hook = ForwardHook()
        self._step_plan: StepPlan | None = None
        self._whole_groups: list[dict[str, Any]] | None = None
        self._moved_back: MovedBack | None = None
        self._inside = False  # a step has begun and not ended
        self._decision_lrs: list[Any] = []
        self._skipped_on_device: Tensor | None = None
        self._expected: set[int] = set()
        self._measured: dict[int, float] = {}  # this step's, by position
        self._ahead: dict[int, float] = {}  # of the coming step, measured before it
        self._warned: set[str] = set()
        self._pending: dict[str, Any] | None = None
        self._given_model = model
        self._example = None if example_inputs is None else _as_forward(example_inputs)
        self.bind()
        if isinstance(self._signal, PlasticitySignal):
            self._input_hook = ForwardHook(self._take_inputs)
            self._input_hook.watch(*_wrappers(model))
        self._warn_if_never_fires()
        self._warn_of_recompilations(model)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_torchs_step)
        optimizer.register_state_dict_pre_hook(lambda _: self._make_whole())  # after a step that raised
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, STATE_KEY: self.state_dict()})
        optimizer.register_load_state_dict_post_hook(lambda _: self._load_pending())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._remember(state))
        self._step_record: StepRecord | None = None
        if os.environ.get(TRIAL_FOLDER):
            from trainables.gradskip.step_record import start

            self._step_record = start(self)

    # --- what is numbered how ---------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Number the optimizer's parameters, before the first step."""
        groups = self.optimizer.param_groups
        self.parameters, self.names = numbered(groups, self._model)
        if len(groups) > 1 and self._model is None and self.settings.mode != "off":
            self._warn_once(
                "groups",
                f"parameters came in {len(groups)} groups and no model: layers are numbered through the groups; "
                "give model= to number them in the model's order",
            )
        self.settings.check_layers(len(self.parameters))
        self._off_at_first = {n for n, p in enumerate(self.parameters) if not p.requires_grad}
        self._ours: set[int] = set()  # numbers whose requires_grad we switched off
        self._left: set[int] = set()  # numbers that stopped because they were left before stopped ones
        self._trace: ModelTrace | None = None
        self._held: int | None = None  # the one parameter kept in the graph when everything is stopped
        self._prefix = PrefixModules(self._model, self.parameters, self.settings)
        self._set_plan(
            make_plan(self.parameters, self.settings.watch, model=self._model, whole_units=self.settings.whole_units)
        )
        self._arrange_trace()

    def _trains(self, number: int) -> bool:
        """Whether the user trains the parameter, stopped or not."""
        return self.parameters[number].requires_grad or number in self._ours

    def _can_stop(self, number: int) -> bool:
        return self._trains(number) and (self.settings.mode != "auto" or self.parameters[number].numel() > 1)

    def _set_plan(self, plan: LayerPlan) -> None:
        """Take a plan, and a machine that has not begun."""
        settings = self.settings
        if not settings.reference:
            # A layer that the user has frozen would never let a rule go on, nor would one number, without variance.
            alive = [unit for unit in plan.units if any(self._can_stop(n) for n in unit.watched)]
            plan = replace(plan, units=tuple(alive))
        stoppable = plan.units if settings.reference else plan.without_last(self._trains)
        self._unit_at: dict[int, Unit] = {unit.end: unit for unit in plan.units}
        self.blueprint = Blueprint(
            plan=plan,
            stoppable=len(stoppable),
            names=None if self.names is None else tuple(self.names),
            single_precision=not any(p.dtype == torch.float64 for p in self.parameters),
        )
        self.machine = self.blueprint.machine(settings)
        self._signal = self._make_signal()
        self._refresh()

    def _make_signal(self) -> Signal:
        if self.settings.mode == "gradient_norm":
            return GradientNormSignal(self.parameters)
        if self.settings.mode == "plasticity":
            assert self._model is not None
            return PlasticitySignal(self.parameters, self._model)
        return VarianceSignal(self.parameters, reference=self.settings.reference)

    def _check_needs_model(self) -> None:
        settings = self.settings
        for field, wanted in (
            ("norm_statistics", settings.norm_statistics == "hold"),
            ("prefix_autograd", not settings.prefix_autograd),
            ("rule", settings.mode == "plasticity"),
        ):
            if wanted and self._model is None:
                value = getattr(settings, field)
                text = int(value) if isinstance(value, bool) else value
                raise UserError(f"CAC_{field.upper()}={text} looks into the model: give model=")
        if settings.mode == "plasticity" and any(
            hasattr(p, "full_tensor") for group in self.optimizer.param_groups for p in group["params"]
        ):
            raise UserError(
                "CAC_RULE must not be plasticity for a sharded model (fully_shard), whose weights no copy can stand in "
                f"for: use one of {', '.join(rule for rule in RULES if rule != 'plasticity')}"
            )

    def _wants_trace(self) -> bool:
        return self._model is not None and self.settings.mode != "off" and not self._sharded

    @property
    def _sharded(self) -> bool:
        return any(hasattr(p, "full_tensor") for p in self.parameters)  # FSDP2's shards

    def _arrange_trace(self) -> None:
        self._end_recording()
        if not self._wants_trace():
            return
        assert self._model is not None
        if self._example is not None:
            try:
                self._take_trace(trace_model(self._model, self.parameters, self._example))
            except Exception as error:  # noqa: BLE001 - any model may raise anything; training itself will say what
                warn_unseen(error)
        elif not _is_compiled(self._given_model):
            self._recorder = ExecutionRecorder(self._model, self.parameters, self._end_recording)

    def _end_recording(self) -> None:
        """Take what the recorder has seen, if anything; a model that is called in parts is never seen whole."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.remove()
            if recorder.has_seen:
                self._take_trace(recorder.trace())

    def _take_trace(self, trace: ModelTrace) -> None:
        self._trace = trace
        if self.machine.iteration == 0:
            self._plan_by_trace()

    def _plan_by_trace(self) -> None:
        if self.settings.whole_units:
            self._set_plan(
                make_plan(self.parameters, self.settings.watch, model=self._model, whole_units=True, trace=self._trace)
            )

    def _warn_if_never_fires(self) -> None:
        watched = {id(self.parameters[n]) for unit in self.plan.units for n in unit.watched}
        decays = [
            float(group["weight_decay"])
            for group in self.optimizer.param_groups
            if "weight_decay" in group and any(id(p) in watched for p in group["params"])
        ]
        reason = never_fires(
            self.settings,
            units=len(self.plan.units),
            stoppable=self.blueprint.stoppable,
            first_stop=self.machine.rule.first_stop(),
            weight_decays=decays or None,
            total_steps=self._total_steps,
        )
        if reason is not None:
            self._warn_once("never", f"Gradient-Skip {reason}")

    def _warn_of_recompilations(self, model: nn.Module | None) -> None:
        stops = self.blueprint.stoppable if self.settings.mode != "manual" else len(self.settings.stop_layer_num or ())
        if model is None or getattr(model, "_orig_mod", None) is None or self.settings.mode == "off":
            return
        limit = int(torch._dynamo.config.recompile_limit)
        if 2 * stops + 2 > limit:
            self._warn_once(
                "recompile",
                f"{stops} layers may stop one by one, and each stop recompiles the model's training graph once and, "
                f"if it is evaluated compiled, that of evaluation; torch._dynamo.config.recompile_limit is {limit}, "
                "after which it runs uncompiled: raise that limit, or watch coarser layers (CAC_WATCH)",
            )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=2)

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> LayerPlan:
        """The layers that are watched, and the order in which parameters stop."""
        return self.blueprint.plan

    @property
    def stopped_through(self) -> int:
        """Position of the last stopped parameter; its number, unless whole units stop. -1 for none."""
        return self.machine.stopped_through

    @property
    def stopped(self) -> tuple[int, ...]:
        """Numbers of the stopped parameters, ascending."""
        return tuple(sorted(self._stopped_numbers(self.stopped_through)))

    @property
    def iteration(self) -> int:
        """Optimizer steps so far that were really taken."""
        self._settle()
        return self.machine.iteration

    def left_upstream(self) -> list[str]:
        """Names of parameters that still train and whose gradients pass through stopped layers.

        Each of them makes the backward pass run on through the layers that are stopped. Empty where the execution
        order is not known, because no model was given or no training step has run.
        """
        if self._trace is None:
            return []
        left = self._trace.left_upstream(set(self.stopped))
        return [self._name(n) for n in sorted(left) if self.parameters[n].requires_grad]

    def _name(self, number: int) -> str:
        return f"parameter {number}" if self.names is None else self.names[number]

    def _stopped_numbers(self, through: int) -> set[int]:
        numbers = set(self.plan.order[: through + 1])
        return numbers | self._left if numbers else numbers

    # --- a step -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """What the next step has to look at, after anything has changed."""
        self._due = self.machine.quiet_until()
        if self._holds_stopped():
            self._due = 0
        self._clean = self.machine.stopped_through >= 0 and not self.settings.reference
        self._busy = self._clean or self._signal.every_step or self._step_plan is not None

    def _holds_stopped(self) -> bool:
        # Published: with a braking distance, stopped layers step with a factor of 0 for ever after.
        return self.settings.reference and self.machine.distance > 0 and self.machine.stopped_through >= 0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        machine = self.machine
        if self._inside and is_nested_step(optimizer):
            return  # a step that calls its base class's step, which torch hooks as well
        if self._recorder is not None and self._recorder.has_seen:
            self._end_recording()
        self._inside = True
        found_inf = optimizer.__dict__.get("found_inf")  # a fused optimizer gets it from GradScaler for each step
        if found_inf is None and not self._busy and machine.iteration < self._due:  # count and go
            machine.iteration += 1
            return
        self._busy_step(found_inf, args, kwargs)

    def _busy_step(self, found_inf: Tensor | None, args: Any, kwargs: Any) -> None:
        if self._step_plan is not None:  # the step before raised, so its hook after never ran
            self._after_step()
        if self._clean:
            self._drop_gradients()
            if self._expected and not _has_closure(args, kwargs):
                self._tell_lost_gradients()
        if self._signal.every_step:
            if _has_closure(args, kwargs):
                raise RuntimeError(
                    f"CAC_RULE={self.settings.mode} looks at gradients before the step and a closure makes them in it: "
                    "call backward() before step(), without a closure"
                )
            units = [unit for unit in self.plan.units if unit.end > self.stopped_through]
            self._signal.observe(units, getattr(self.optimizer, "grad_scale", None), found_inf)
        if found_inf is not None and self._skipped(found_inf):
            return
        machine = self.machine
        if machine.iteration < self._due:
            machine.iteration += 1
            if self._held is not None and _has_closure(args, kwargs):
                self._scale([(range(len(self.parameters)), 0.0)])
            return
        plan = self._decide()
        if plan.scaled or self._holds_stopped():
            self._scale(plan.scaled)

    def look_ahead(self) -> None:
        """Measure now what the coming step's decision will look at: something else changes weights within the step.

        For signals of weights alone. Without this a decision looks at the weights in the optimizer's step, which are
        the same where nothing else changes them.
        """
        if isinstance(self._signal, VarianceSignal) and self.machine.iteration >= self._due:
            units = [unit for unit in self.plan.units if unit.end > self.stopped_through]
            if units:
                self._ahead = dict(zip([unit.end for unit in units], self._measure(units), strict=True))

    def _decide(self) -> StepPlan:
        machine = self.machine
        iteration = machine.iteration
        looks = machine.braking_through < 0 and machine.rule.next_due(iteration) == iteration
        self._measured, self._ahead = self._ahead, {}
        plan = self._step_plan = machine.step(self._signal_of)
        if looks:
            self._signal.measured()
        self._refresh()
        if plan.decision is not None:
            self._record(iteration, plan)
        return plan

    def _record(self, iteration: int, plan: StepPlan) -> None:
        decision = plan.decision
        assert decision is not None
        done = sum(event.rule == "manual" for event in self.events)
        self.events.append(self.blueprint.event(iteration, decision, self.settings, done))
        self._decision_lrs = [_plain(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def _signal_of(self, position: int) -> float:
        if position not in self._measured:
            asked = [self._unit_at[position]]
            if self._signal.together:
                asked = [unit for unit in self.plan.units if unit.end > self.stopped_through]
            self._measured.update(zip([unit.end for unit in asked], self._measure(asked), strict=True))
        return self._measured[position]

    def _measure(self, units: Sequence[Unit]) -> list[float]:
        values = self._signal.measure(units)
        if self.process_group is not None:
            # The first process's numbers are everybody's: a last bit must not stop a layer on some of them alone.
            values = values.detach().clone()
            source = torch.distributed.get_global_rank(self.process_group, 0)
            torch.distributed.broadcast(values, source, group=self.process_group)
        numbers: list[float] = [float(values)] if len(values) == 1 else values.tolist()  # waits for the device
        for told in self.on_measured:
            for unit, number in zip(units, numbers, strict=True):
                told(unit, number)
        if isinstance(self._signal, VarianceSignal):
            for unit, number in zip(units, numbers, strict=True):
                if math.isnan(number):
                    self._warn_once(
                        "nan",
                        f"the weights of {self._name(unit.number)} hold a NaN: their variance is NaN and stops nothing",
                    )
        return numbers

    def _skipped(self, found_inf: Tensor) -> bool:
        """Whether GradScaler lets this fused step do nothing, which is then no iteration.

        Away from decisions skipped steps are only summed up on the device; the sum is read when a decision is near.
        """
        if self.machine.iteration < self._due:
            total = self._skipped_on_device
            self._skipped_on_device = found_inf.detach().clone() if total is None else total.add_(found_inf)
            return False
        total = self._skipped_on_device
        now = found_inf.detach().reshape(())
        before, skips = torch.stack([now.new_zeros(()) if total is None else total.reshape(()), now]).tolist()
        self._skipped_on_device = None
        self.machine.iteration -= round(before)
        if self.machine.iteration < self._due:
            self._skipped_on_device = found_inf.detach().clone()
            return False
        return bool(skips)

    def _settle(self) -> None:
        """Take the skipped steps that the device knows of out of the count."""
        if self._skipped_on_device is not None:
            self.machine.iteration -= round(float(self._skipped_on_device))
            self._skipped_on_device = None

    def _scale(self, scaled: Sequence[tuple[range, float]]) -> None:
        """Arrange for this step's updates of some positions to be multiplied."""
        factor_at: dict[int, float] = {}
        for positions, factor in scaled:
            factor_at.update({id(self.parameters[self.plan.order[place]]): factor for place in positions})
        groups = self.optimizer.param_groups
        if self.settings.reference:
            for place in range(self.stopped_through + 1):
                factor_at.setdefault(id(self.parameters[place]), 0.0)
            bases = self._decision_lrs
        elif is_linear_in_lr(self.optimizer):
            bases = [group["lr"] for group in groups]
        else:
            trained = [p for p in self.parameters if id(p) in factor_at and p.requires_grad]
            self._moved_back = MovedBack([(p, factor_at[id(p)]) for p in trained])
            self._step_plan = self._step_plan or StepPlan()
            self._busy = True
            return
        self._whole_groups = groups
        self._step_plan = self._step_plan or StepPlan()
        self._busy = True
        self.optimizer.param_groups = split_groups(groups, lambda p: factor_at.get(id(p)), bases)

    def _make_whole(self) -> None:
        """Put split groups together."""
        if self._whole_groups is not None:
            self.optimizer.param_groups, self._whole_groups = self._whole_groups, None

    def _after_torchs_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._step_plan is None:
            self._inside = False
        elif not is_nested_step(optimizer):
            self._inside = False
            self._after_step()

    def _after_step(self) -> None:
        plan = self._step_plan
        if plan is None:
            return
        self._step_plan = None
        self._make_whole()
        if self._moved_back is not None:
            self._moved_back.scale()
            self._moved_back = None
        if plan.stop_through is not None:
            if not self.settings.reference and self.settings.prefix_autograd:
                self._expected = {n for n, p in enumerate(self.parameters) if p.grad is not None}
            before = self._needing_gradients()
            self._stop(plan.stop_through)
            self._tell_of_change(before)
            self._tell_what_is_left()
        self._refresh()

    # --- a stop -----------------------------------------------------------------------------------------------------

    def _stop(self, through: int) -> None:
        stopped = self._stopped_numbers(through)
        if stopped and not self.settings.prefix_autograd and self._trace is not None:
            self._left |= self._trace.left_upstream(stopped)
            stopped |= self._left
        keep = None
        if not self.settings.reference and not self._trains_beside(stopped):
            # A loss that needs no gradient at all raises in backward(), and GradScaler wants to see one.
            keep = max((n for n in stopped if self._trains(n)), key=self.plan.order.index, default=None)
        for number in sorted(stopped):
            parameter = self.parameters[number]
            if number == keep:
                self._held = number
            elif parameter.requires_grad:
                parameter.requires_grad_(False)
                self._ours.add(number)
            if not self.settings.reference:
                parameter.grad = None
                self.optimizer.state.pop(parameter, None)  # momentum of a layer that never moves again
        frozen = {n for n in range(len(self.parameters)) if n not in stopped and not self._trains(n)}
        self._prefix.stop(stopped, frozen, self._trace, cut=keep is None)

    def _tell_of_change(self, before: list[bool]) -> None:
        """Call `on_stop` where other parameters need a gradient than before."""
        if before != self._needing_gradients():
            for told in self.on_stop:
                told()

    def _needing_gradients(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def _trains_beside(self, stopped: set[int]) -> bool:
        return any(self._trains(n) for n in range(len(self.parameters)) if n not in stopped)

    def _tell_what_is_left(self) -> None:
        if not self._trains_beside(set(self.stopped)):
            self._warn_once("all", "every parameter of this optimizer is stopped: training goes on with nothing to do")
        left = self.left_upstream()
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            self._warn_once(
                "left " + ",".join(left),
                f"{shown} still train{'s' if len(left) == 1 else ''} before stopped layers, so the backward pass runs "
                "on through them: CAC_WHOLE_UNITS=1 stops layers with their norms in execution order, "
                "CAC_PREFIX_AUTOGRAD=0 stops whatever is left",
            )
        if self._wants_trace() and self._trace is None:
            self._warn_once(
                "unseen",
                "the execution order of the layers was never seen, so they stop in the order of registration and what "
                "is left before them is not known: the model is called in a way that hides it, as under torch.compile. "
                "Give example_inputs=",
            )
        if self.process_group is None and _several_processes() and not self._sharded:
            self._warn_once(
                "processes",
                "a layer stopped in one of several processes, which torch's DistributedDataParallel does not expect: "
                "use tune_cac.gradskip.DistributedDataParallel(model, optimizer)",
            )

    def _tell_lost_gradients(self) -> None:
        """In the first step after a stop: whoever had a gradient before it and has not stopped must have one still."""
        alive = self._expected - set(self.stopped)
        self._expected = set()
        lost = [self._name(n) for n in sorted(alive) if self.parameters[n].grad is None]
        if lost:
            self._warn_once(
                "lost",
                f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} had a gradient before the last stop "
                "and none after it. Reentrant activation checkpointing does that behind a stopped prefix: use "
                "checkpoint(..., use_reentrant=False). (A layer that a step may leave out is no reason to worry.)",
            )

    def _drop_gradients(self) -> None:
        # A backward pass through a graph built before the stop (gradient accumulation, a retained graph) still
        # reaches stopped parameters, and the held one goes on getting a gradient.
        for number in self.plan.order[: self.machine.stopped_through + 1]:
            parameter = self.parameters[number]
            if parameter.grad is not None:
                parameter.grad = None
            if parameter.requires_grad and number in self._ours:
                parameter.requires_grad_(False)
                self._warn_once(
                    "woken",
                    f"requires_grad of {self._name(number)}, which has stopped, was switched on again: it is stopped "
                    "in every step anew, but its gradient is computed in between. Switch only what trains "
                    "(optimizer.gradskip.stopped)",
                )

    # --- inputs for plasticity --------------------------------------------------------------------------------------

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.machine.iteration >= self._due and isinstance(self._signal, PlasticitySignal):
            self._signal.inputs = (args, kwargs)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole rule's state in plain types and tensors (``torch.load(weights_only=True)`` reads them)."""
        self._settle()
        counted = {} if self._step_record is None else {"step_record": self._step_record.state_dict()}
        return {
            **counted,
            "machine": self.machine.state_dict(),
            "events": [asdict(event) for event in self.events],
            "decision_lrs": list(self._decision_lrs),
            "signal": self._signal.state_dict(),
            "mode": self.settings.mode,
            "trains": [self._trains(number) for number in range(len(self.parameters))],
            "left": sorted(self._left),
            "trace": None if self._trace is None else self._trace.state_dict(),
            "order": list(self.plan.order),
            "units": [[unit.number, list(unit.watched), unit.end] for unit in self.plan.units],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: iteration, peaks, braking; parameters stop or train again accordingly.

        Raises:
            UserError: the state is of an optimizer with another number of parameters.
        """
        if len(state["order"]) != len(self.parameters):
            raise UserError(
                f"the state to load is of {len(state['order'])} parameters, but this optimizer has "
                f"{len(self.parameters)}: load it into the model that it was saved from"
            )
        if self._step_record is not None and "step_record" in state:
            self._step_record.load_state_dict(state["step_record"])
        before = self._needing_gradients()
        self._forget_step()
        self._skipped_on_device = None
        if state["trace"] is not None:
            self._end_recording()
            self._trace = ModelTrace.from_state(state["trace"])  # a run that is resumed has been seen
        for number, parameter in enumerate(self.parameters):
            # Also into a model that is partly stopped: what the saved run trained trains again, and what the user has
            # frozen since this optimizer was built stays frozen.
            ours = number in self._ours or (number in self._off_at_first and state["trains"][number])
            if ours and not parameter.requires_grad:
                parameter.requires_grad_(True)
        self._ours, self._held = set(), None
        self._left = set(state["left"])
        self._set_plan(
            LayerPlan(
                order=tuple(state["order"]),
                units=tuple(Unit(number=n, watched=tuple(w), end=e) for n, w, e in state["units"]),
                whole_units=self.settings.whole_units,
            )
        )
        if state["machine"]["iteration"] == 0 and self._trace is not None:
            self._plan_by_trace()  # the state is older than the trace
        same = state["mode"] == self.settings.mode
        fresh_rule = self.machine.rule.state_dict()
        self.machine.load_state_dict({**state["machine"], "rule": state["machine"]["rule"] if same else fresh_rule})
        if same:
            self._signal.load_state_dict(state["signal"])
        elif state["mode"] != "off":
            self._warn_once(
                "mode",
                f"the state is of rule {state['mode']} and the settings ask for {self.settings.mode}: iterations and "
                "stops go on, the rule begins anew",
            )
        self.events = [StopEvent(**event) for event in state["events"]]
        self._decision_lrs = list(state["decision_lrs"])
        self._prefix.release()
        self._stop(self.stopped_through)
        self._tell_of_change(before)
        self._refresh()

    def _forget_step(self) -> None:
        """Of a step that raised half-way nothing is left to do."""
        self._make_whole()
        self._step_plan, self._moved_back, self._inside = None, None, False
        self._expected = set()

    def _remember(self, state: dict[str, Any]) -> None:
        self._forget_step()
        self._pending = state.get(STATE_KEY)

    def _load_pending(self) -> None:
        # A state without ours (saved by torch's own optimizer) leaves the rule as it is.
        if self._pending is not None:
            self.load_state_dict(self._pending)
        self._pending = None


def is_nested_step(optimizer: Optimizer) -> bool:
    """Whether more than one of torch's wrappers of `step` is at work on this optimizer, one inside the other."""
    frame: Any = sys._getframe(1)
    wrappers = 0
    while frame is not None and wrappers < 2:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            wrappers += 1
        frame = frame.f_back
    return wrappers > 1


def _plain(lr: Any) -> Any:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def _has_closure(args: Any, kwargs: Any) -> bool:
    # args holds the optimizer itself first.
    return any(callable(a) for a in args[1:]) or callable(kwargs.get("closure"))


def _several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _as_forward(example: Any) -> Callable[[nn.Module], Any]:
    if isinstance(example, Tensor):
        return lambda model: model(example)
    if isinstance(example, (tuple, list)):
        return lambda model: model(*example)
    if callable(example):
        forward: Callable[[nn.Module], Any] = example
        return forward
    raise UserError(
        "example_inputs must be a tensor, a tuple of inputs, or a function that runs the model, got "
        f"{type(example).__name__}"
    )


def _wrappers(model: nn.Module | None) -> list[nn.Module]:
    """The model given and every wrapper inside it, down to the model itself."""
    assert model is not None
    inner = unwrap(model)
    return [model] if model is inner else [model, inner]


def _is_compiled(model: nn.Module | None) -> bool:
    """Return whether `torch.compile` hides the calls of the model's modules."""
    assert model is not None
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in _wrappers(model))
