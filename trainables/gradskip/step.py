"""Gradient-Skip around an optimizer's step.

``optimizer.step`` is replaced on the object by a function that does the work due before the step, calls the original
step, and restores everything, also if the step raises. The step itself stays the optimizer's own, foreach, fused and
capturable paths included; torch.compile compiles it and leaves the surrounding function to Python. If no work is due,
the surrounding function costs a counter and three comparisons.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.advice.occasions import advise_of_left
from trainables.gradskip.decisions import Decisions
from trainables.gradskip.numbering import Numbering
from trainables.gradskip.rules.state_machine import StepPlan
from trainables.gradskip.scaling import GroupChanges, MovedBack, is_linear_in_lr, split_groups
from trainables.gradskip.settings import Settings
from trainables.gradskip.skipped_steps import SkippedSteps
from trainables.gradskip.stops import Stops

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
