"""Gradient-Skip around an optimizer's step.

``optimizer.step`` is replaced on the object by a function that does the work due before the step, calls the original
step, and restores everything, also if the step raises. The step itself stays the optimizer's own, foreach, fused and
capturable paths included; torch.compile compiles it and leaves the surrounding function to Python. If no work is due,
the surrounding function costs a counter and three comparisons.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.advice.occasions import advise_of_left
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.replay import Blueprint, LayerPlan, StopEvent, Unit
from trainables.gradskip.rules.state_machine import SkipMachine, StepPlan
from trainables.gradskip.settings import Settings
from trainables.gradskip.stops import Decisions, Stops

# --- State of an optimizer's Gradient-Skip, for users and the rest of the package -------------------------------------


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


# --- Scaling of the update of some parameters in one step; the rest of the step is unchanged --------------------------
# For torch optimizers whose update is linear in the group's learning rate, these parameters are put into separate
# groups with a multiplied learning rate, and torch's foreach and fused paths do the rest. Any other optimizer may use
# its learning rate in any way, or keep counters in its groups; there the parameters are moved back after the step:
# p = p_before + factor * (p_after - p_before).

#: Optimizers whose update, weight decay included, is proportional to ``lr``, and whose groups contain only settings.
_LINEAR_NAMES = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Muon",
)  # fmt: skip


def is_linear_in_lr(optimizer: Optimizer) -> bool:
    """Return whether multiplying a group's ``lr`` multiplies the update: true for torch's own step of a known class."""
    own = inspect.unwrap(type(optimizer).step)
    classes = [getattr(torch.optim, name, None) for name in _LINEAR_NAMES]
    return any(own is inspect.unwrap(cls.step) for cls in classes if cls is not None)


def split_groups(
    groups: Sequence[dict[str, Any]],
    factor_of: Callable[[Tensor], float | None],
    base_lrs: Sequence[Any],
) -> list[dict[str, Any]]:
    """Split groups so that parameters with different factors are separate; a factor of None keeps ``lr``.

    Args:
        groups: the optimizer's parameter groups.
        factor_of: each parameter's factor.
        base_lrs: learning rates that the factors multiply, one per group.
    """
    split: list[dict[str, Any]] = []
    for group, base in zip(groups, base_lrs, strict=True):
        parts: dict[float | None, list[Tensor]] = {}
        for parameter in group["params"]:
            parts.setdefault(factor_of(parameter), []).append(parameter)
        # Ascending factors, unscaled last: an order that does not depend on which parameter came first.
        for factor in sorted(parts, key=lambda f: (f is None, f or 0.0)):
            lr = group["lr"] if factor is None else base * factor
            split.append({**group, "params": parts[factor], "lr": lr})
    return split


class GroupChanges:
    """Temporary changes of an optimizer's groups during a step."""

    def __init__(self) -> None:
        self._changes: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def do(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Apply a change, and record how to undo it."""
        self._changes.append((do, undo))
        do()

    def suspend(self) -> None:
        """Undo the changes temporarily within the step, until `resume`."""
        for _, undo in reversed(self._changes):
            undo()

    def resume(self) -> None:
        """Apply the changes again after `suspend`."""
        for do, _ in self._changes:
            do()

    def put_back(self) -> None:
        """Undo all changes."""
        self.suspend()
        self._changes.clear()


class MovedBack:
    """Copies of parameters from before a step, to scale the step afterwards."""

    def __init__(self, factors: Sequence[tuple[Tensor, float]]) -> None:
        self._before = [(parameter, parameter.detach().clone(), factor) for parameter, factor in factors]

    def scale(self) -> None:
        """Scale the change that the step has made."""
        with torch.no_grad():
            for parameter, before, factor in self._before:
                if factor == 0:
                    parameter.copy_(before)
                else:
                    parameter.sub_(before).mul_(factor).add_(before)


# --- Steps that GradScaler makes a fused optimizer skip, although the optimizer's `step` is called --------------------


class SkippedSteps:
    """Subtract steps skipped for infinities from a machine's count; read the device only at decisions."""

    def __init__(self) -> None:
        self._total: Tensor | None = None  # skipped and still counted; on the device

    def is_skipped(self, found_inf: Tensor, machine: SkipMachine, due: int) -> bool:
        """Return whether the coming step is skipped, and thus is no iteration.

        Between decisions, skipped steps are only summed on the device; the sum is read when a decision is near.

        Args:
            found_inf: GradScaler's flag for this step, 1 where there are infinities.
            machine: counts the iterations.
            due: iterations before this one have nothing to decide.
        """
        if machine.iteration < due:
            self._total = found_inf.detach().clone() if self._total is None else self._total.add_(found_inf)
            return False
        now = found_inf.detach().reshape(())
        total = now.new_zeros(()) if self._total is None else self._total.reshape(())
        before, skips = torch.stack([total, now]).tolist()
        self._total = None
        machine.iteration -= round(before)
        if machine.iteration < due:
            self._total = found_inf.detach().clone()
            return False
        return bool(skips)

    def settle(self, machine: SkipMachine) -> None:
        """Correct the iteration count by the steps that GradScaler skipped; synchronizes with the device."""
        if self._total is not None:
            machine.iteration -= round(float(self._total))
            self._total = None

    def forget(self) -> None:
        """Discard the sum, before another state is loaded."""
        self._total = None


# --- Gradient-Skip around an optimizer's step -------------------------------------------------------------------------

#: Called at every step with its arguments.
StepListener = Callable[[tuple[Any, ...], dict[str, Any]], None]


class Step:
    """Wrapper around an optimizer's step.

    Args:
        optimizer: any.
        decisions: the rule.
        settings: of the rule.
        advice: warns of lost gradients, and of stopped parameters that the user has switched on.
        on_stopped: called after a stop, before the step returns.
        on_replaced: called before a step in which the optimizer has other parameters than before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        decisions: Decisions,
        settings: Settings,
        advice: Advice,
        on_stopped: Callable[[int], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._decisions = decisions
        self._settings = settings
        self._advice = advice
        self._on_stopped, self._on_replaced = on_stopped, on_replaced
        self._is_linear = is_linear_in_lr(optimizer)
        self.before: list[StepListener] = []
        """Called before each step of the optimizer."""
        self.after: list[StepListener] = []
        """Called after each step that did not raise."""
        self.once: list[Callable[[], None]] = []
        """Called once, before the next step."""
        self._plan: StepPlan | None = None
        self.groups = GroupChanges()
        """Temporary changes of the optimizer's groups during a step."""
        self._moved_back: MovedBack | None = None
        self.skipped = SkippedSteps()
        """Count of the steps that GradScaler skips."""
        self._expected: set[int] = set()
        self.due = 0
        """The first iteration that may have something to decide."""
        self._busy = True

    def bind(self, numbering: Numbering, stops: Stops) -> None:
        """Use the parameters of a numbering, and their stops."""
        self._numbering, self._stops = numbering, stops
        self.refresh()

    def install(self) -> None:
        """Replace the optimizer's step by one with Gradient-Skip around it."""
        inner = self._optimizer.step

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            machine = self._decisions.machine
            captured = torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()
            ordinary = not (captured or self._busy) and machine.iteration < self.due
            # A fused optimizer gets found_inf from GradScaler for each step.
            if ordinary and "found_inf" not in optimizer.__dict__:
                machine.iteration += 1
                return inner(*args, **kwargs)
            self._begin(args, kwargs, captured=captured)
            if self._clean and has_closure(args, kwargs):
                args, kwargs = self._guarded(args, kwargs)
            try:
                result = inner(*args, **kwargs)
            except BaseException:
                self.groups.put_back()
                self._moved_back = None
                self._finish()
                raise
            self._end(args, kwargs)
            return result

        around = torch.compiler.disable(step, recursive=False)  # dynamo compiles the original step
        self._optimizer.step = types.MethodType(around, self._optimizer)  # type: ignore[method-assign]

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the closure wrapped, so that stopped parameters have no gradient after it."""

        def guarded(closure: Any) -> Any:
            if not callable(closure):
                return closure

            @functools.wraps(closure)
            def inside(*given: Any, **named: Any) -> Any:
                loss = closure(*given, **named)
                self._enforce(False)
                return loss

            return inside

        return tuple(map(guarded, args)), {name: guarded(value) for name, value in kwargs.items()}

    def refresh(self) -> None:
        """Determine what the next step has to check, after anything has changed."""
        self.due = 0 if self._holds_published() else self._decisions.look_due()
        self._clean = self._stops.any and not self._settings.reference
        self._busy = bool(
            self._clean
            or self._decisions.signal.every_step
            or self._numbering.records
            or self.once
            or self.before
            or self.after
            or self._expected
        )

    def _holds_published(self) -> bool:
        # Published code: with a braking distance, stopped layers keep stepping with a factor of 0.
        machine = self._decisions.machine
        return self._settings.reference and machine.distance > 0 and machine.stopped_through >= 0

    # --- before -----------------------------------------------------------------------------------------------------

    def _begin(self, args: Any, kwargs: Any, *, captured: bool) -> None:
        if not self._numbering.follows(self._optimizer.param_groups):
            self._on_replaced()
        if self._numbering.records:
            self._numbering.end_recording_at_step()
        closure = has_closure(args, kwargs)
        if self._clean:
            self._enforce(not closure)
        while self.once:
            self.once.pop()()
        decisions = self._decisions
        if captured:  # by a CUDA graph: the step does not run now, and its replays do not pass here
            if decisions.can_stop_more():
                self._advice.captured()
            return self._arrange(())
        found_inf = self._optimizer.__dict__.get("found_inf")
        if decisions.signal.every_step:
            if closure:
                raise RuntimeError(
                    f"CAC_RULE={self._settings.mode} looks at gradients before the step and a closure makes them in "
                    "it: call backward() before step(), without a closure"
                )
            scale = getattr(self._optimizer, "grad_scale", None)
            decisions.signal.observe(decisions.running_units(), scale, found_inf)
        for told in self.before:
            told(args, kwargs)
        scaled: Sequence[tuple[range, float]] = ()
        if found_inf is None or not self.skipped.is_skipped(found_inf, decisions.machine, self.due):
            scaled = self._decide()
        self._arrange(scaled)

    def _decide(self) -> Sequence[tuple[range, float]]:
        decisions = self._decisions
        may_decide = decisions.machine.iteration >= self.due and decisions.machine.braking_through < 0
        if may_decide and decisions.follow_user():
            if self._stops.unfrozen.intersection(self._stops.left_upstream()):
                advise_of_left(self._advice, self._numbering, self._stops)
            self.refresh()
        machine = decisions.machine
        if machine.iteration < machine.quiet_until() and not self._holds_published():
            machine.iteration += 1
            if machine.iteration > self.due:
                self.refresh()
            return ()
        self._plan = decisions.decide()
        return self._plan.scaled

    def _enforce(self, backward_is_done: bool) -> None:
        woken = self._stops.enforce(whole=not self._is_linear)
        if woken:
            self._advice.woken(self._numbering.name(woken[0]))
        if self._expected and backward_is_done:
            self._tell_lost_gradients()

    def _tell_lost_gradients(self) -> None:
        """Warn, in the first step after a stop, of running parameters that have lost their gradient."""
        self._stops.look_at_user()
        alive = [n for n in sorted(self._expected) if self._stops.moves(n)]
        self._expected = set()
        lost = [self._numbering.name(n) for n in alive if self._numbering.parameters[n].grad is None]
        if lost:
            self._advice.lost_gradients(lost)

    def _arrange(self, scaled: Sequence[tuple[range, float]]) -> None:
        """Exclude stopped parameters from this step, and multiply the updates of some positions."""
        numbering, stops, optimizer = self._numbering, self._stops, self._optimizer
        order = numbering.order
        factor_at: dict[int, float] = {}
        for positions, factor in scaled:
            numbers = (order[place] for place in positions)
            moving = (n for n in numbers if self._settings.reference or not stops.holds(n))
            factor_at.update({id(numbering.parameters[n]): factor for n in moving})
        groups = optimizer.param_groups
        if self._settings.reference:
            if scaled or self._holds_published():
                for place in range(self._decisions.machine.stopped_through + 1):
                    factor_at.setdefault(id(numbering.parameters[order[place]]), 0.0)
                self._split(groups, factor_at, self._decisions.learning_rates)
        elif self._is_linear:
            if stops.any:
                self.groups.do(*stops.take_out())
            if factor_at:
                self._split(groups, factor_at, [group["lr"] for group in groups])
        elif factor_at:
            self._moved_back = MovedBack([(p, factor_at[id(p)]) for p in numbering.parameters if id(p) in factor_at])

    def _split(self, groups: list[dict[str, Any]], factor_at: dict[int, float], bases: Sequence[Any]) -> None:
        give = functools.partial(setattr, self._optimizer, "param_groups")
        split = split_groups(groups, lambda p: factor_at.get(id(p)), bases)
        self.groups.do(functools.partial(give, split), functools.partial(give, groups))

    # --- after ------------------------------------------------------------------------------------------------------

    def _end(self, args: Any, kwargs: Any) -> None:
        self.groups.put_back()
        if self._moved_back is not None:
            self._moved_back.scale()
            self._moved_back = None
        self._finish()
        for told in self.after:
            told(args, kwargs)

    def _finish(self) -> None:
        plan, self._plan = self._plan, None
        if plan is None:
            if self._busy and not self._clean:
                self.refresh()
            return
        if plan.stop_through is not None and not self._settings.reference:
            self._expected = {n for n, p in enumerate(self._numbering.parameters) if p.grad is not None}
        try:
            if plan.stop_through is not None:
                self._on_stopped(plan.stop_through)
        finally:  # a warning may be an error
            self.refresh()

    def forget(self) -> None:
        """Discard the unfinished work of a step that raised, before another state is loaded."""
        self.groups.put_back()
        self._plan, self._moved_back = None, None
        self._expected = set()

    def settle(self) -> None:
        """Subtract the skipped steps that were counted on the device from the iterations."""
        self.skipped.settle(self._decisions.machine)


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether a step was called with a closure."""
    return any(callable(a) for a in args) or callable(kwargs.get("closure"))
