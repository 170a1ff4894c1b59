"""One step of an optimizer with Gradient-Skip: measure layers, decide, leave stopped parameters out, stop.

``optimizer.step`` is replaced on the object by a function that does what is due before the step, calls the original,
and restores everything, also if the step raises. The step itself stays the optimizer's own, foreach, fused and
capturable paths included; torch.compile compiles it and leaves the surrounding function to Python. Where nothing is
due, that function costs a counter and two comparisons.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.gradskip.advice import Advice, some
from trainables.gradskip.execution_order import ForwardHook
from trainables.gradskip.layers import unwrap
from trainables.gradskip.numbering import Numbering, as_forward, is_compiled
from trainables.gradskip.replay import Blueprint, LayerPlan, StopEvent, Unit
from trainables.gradskip.rules.choice import NAMED
from trainables.gradskip.rules.state_machine import NEVER, SkipMachine, StepPlan
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import PlasticitySignal, Signal, VarianceSignal, make_signal
from trainables.gradskip.stops import Stops, blueprint_of, is_watched

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
    groups: Iterable[tuple[dict[str, Any], list[Tensor]]], factor_at: dict[int, float], base_lrs: Sequence[Any]
) -> list[dict[str, Any]]:
    """Split groups, each with its parameters, so that those with different factors (by id) are separate.

    Those without a factor keep ``lr``; factors multiply ``base_lrs``, one per group.
    """
    split: list[dict[str, Any]] = []
    for (group, parameters), base in zip(groups, base_lrs, strict=True):
        parts: dict[float | None, list[Tensor]] = {}
        for parameter in parameters:
            parts.setdefault(factor_at.get(id(parameter)), []).append(parameter)
        # Ascending factors, unscaled last: an order that does not depend on which parameter came first.
        for factor in sorted(parts, key=lambda f: (f is None, f or 0.0)):
            lr = group["lr"] if factor is None else base * factor
            split.append({**group, "params": parts[factor], "lr": lr})
    return split


@torch.no_grad()
def scale_change(parameter: Tensor, before: Tensor, factor: float) -> None:
    """Multiply what has changed a parameter since ``before``."""
    if factor == 0:
        parameter.copy_(before)
    else:
        parameter.sub_(before).mul_(factor).add_(before)


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether a step was called with a closure."""
    return any(callable(a) for a in args) or callable(kwargs.get("closure"))


# --- Gradient-Skip around an optimizer's step -------------------------------------------------------------------------

#: Iterations without any change that make a warning: a warm-up may begin with a learning rate of 0.
STILL_FOR = 4
#: Called at every step with its arguments.
StepListener = Callable[[tuple[Any, ...], dict[str, Any]], None]
#: An optimizer's groups, and the parameters of each.
Groups = tuple[list[dict[str, Any]], list[list[Tensor]]]


class SkippingStep:
    """An optimizer's step with a rule around it; `GradientSkip` attaches it, documents its arguments, and saves it.

    Attributes:
        model: without wrappers, if it was given.
        numbering: the parameters' numbers, their execution order, and the layers among them.
        stops: the stopped and frozen parameters, with reasons.
        machine: counts iterations, asks the rule and brakes.
        events: every stop decision so far.
        learning_rates: of the groups at the last decision, which the published braking multiplies.
        process_group: processes that decide together, or None.
        due: the first iteration that may have something to decide.
        on_stop: called after the set of parameters that need a gradient has changed.
        on_measured: called with every number measured for a decision.
        before: called before each step of the optimizer.
        after: called after each step that did not raise.
        step_record: record of the steps' cost in a script that a search runs, else None.
    """

    numbering: Numbering
    stops: Stops
    blueprint: Blueprint
    machine: SkipMachine
    signal: Signal

    def __init__(
        self, optimizer: Optimizer, settings: Settings, given_model: nn.Module | None, example_inputs: Any,
        named_in: nn.Module | None,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.settings = settings
        self.model = None if given_model is None else unwrap(given_model)
        self.advice = Advice()
        self.events: list[StopEvent] = []
        self.learning_rates: list[Any] = []
        self.process_group: Any = None
        self.due = 0
        self.on_stop: list[Callable[[], None]] = []
        self.on_measured: list[Callable[[Unit, float], None]] = []
        self.before: list[StepListener] = []
        self.after: list[StepListener] = []
        self.step_record: Any = None
        self._given_model, self._named_in = given_model, named_in
        self._example_given = example_inputs is not None
        self._example = as_forward(example_inputs) if self._example_given else None
        self._input_hook = ForwardHook(self._take_inputs)
        self._first_inputs = ForwardHook(self._trace_first_inputs)
        self._before_forward = ForwardHook(self._switch_off)  # where the user switches stopped parameters on
        #: Names of parameters that an earlier optimizer had stopped: warned of at the next step, unless a state is
        #: loaded before.
        self._earlier: list[str] = []
        self._is_linear = is_linear_in_lr(optimizer)
        self._busy = True
        self._plan: StepPlan | None = None
        self._outside: Groups | None = None  # the groups as the user has them; None where the step uses the same
        self._inside: Groups | None = None  # those of the step that runs
        self._moved: list[tuple[Tensor, Tensor, float]] = []  # parameters, their values before the step, factors
        self._expected: set[int] = set()  # numbers of those that had a gradient when something stopped
        self._measured: dict[int, float] = {}  # this step's signals, by position
        self._ahead: dict[int, float] = {}  # those of the coming step, measured before it
        #: Signals, the iteration since which they are unchanged, and the looks since then, by position.
        self._unchanged: dict[int, tuple[float, int, int]] = {}
        self._number()

    @property
    def parameters(self) -> list[Tensor]:
        return self.numbering.parameters

    @property
    def names(self) -> list[str] | None:
        """Return the names of the parameters, where known."""
        return self.numbering.names

    @property
    def plan(self) -> LayerPlan:
        return self.blueprint.plan

    @property
    def stopped_through(self) -> int:
        """Return the position of the last parameter that the rule has stopped, -1 for none; see `layers`."""
        return self.machine.stopped_through

    @property
    def stopped(self) -> tuple[int, ...]:
        """Return the numbers of the parameters that Gradient-Skip has stopped, ascending; `stops` has the reasons."""
        return self.stops.numbers

    @property
    def iteration(self) -> int:
        """Return the number of optimizer steps so far; one that a fused optimizer skips for a GradScaler counts."""
        return self.machine.iteration

    def left_upstream(self) -> list[str]:
        """Return the names of running parameters with gradients through stopped layers; empty without a trace."""
        return [self.numbering.name(n) for n in self.stops.left_upstream()]

    # --- the step ---------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        inner = self.optimizer.step

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            machine = self.machine
            if not self._busy and machine.iteration < self.due:
                machine.iteration += 1
                return inner(*args, **kwargs)
            self._begin(args, kwargs)
            if self._clean and has_closure(args, kwargs):
                args = tuple(map(self._guarded, args))
                kwargs = {name: self._guarded(value) for name, value in kwargs.items()}
            try:
                result = inner(*args, **kwargs)
            except BaseException:
                self._moved = []
                raise
            finally:
                self._finish()
            for listener in self.after:
                listener(args, kwargs)
            return result

        around = torch.compiler.disable(step, recursive=False)  # dynamo compiles the original step
        self.optimizer.step = types.MethodType(around, self.optimizer)  # type: ignore[method-assign]

    def refresh(self) -> None:
        """Determine what the next step has to check, after anything has changed."""
        self.due = 0 if self._holds_published() else self._look_due()
        if self.machine.iteration > 0:
            self._example = None  # no more parameters can come
        self._clean = self.stops.any and not self.settings.reference
        self._busy = bool(
            self._clean
            or self._example is not None  # let go of after the first step
            or self.signal.every_step
            or self.numbering.records
            or self._earlier
            or self.before
            or self.after
            or self._expected
        )

    def _holds_published(self) -> bool:
        # Published code: with a braking distance, stopped layers keep stepping with a factor of 0.
        return self.settings.reference and self.machine.distance > 0 and self.machine.stopped_through >= 0

    def _begin(self, args: Any, kwargs: Any) -> None:
        groups = self.optimizer.param_groups
        if not self.numbering.follows(groups):
            if self.machine.iteration == 0:
                self.bind()
            else:
                self.numbering.follow(groups)
        self.numbering.end_recording_at_step()
        closure = has_closure(args, kwargs)
        if self._clean:
            self._enforce(backward_is_done=not closure)
        if self._earlier:
            self.advice.say("earlier", names=some(self._earlier, 5))
            self._earlier = []
        if self.signal.every_step:
            if closure:
                raise RuntimeError(
                    f"CAC_RULE={self.settings.mode} looks at gradients before the step and a closure makes them in "
                    "it: call backward() before step(), without a closure"
                )
            scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
            self.signal.observe(self._running_units(), scale, found_inf)
        for listener in tuple(self.before):  # one may leave
            listener(args, kwargs)
        self._arrange(self._decide())

    def _guarded(self, closure: Any) -> Any:
        """Return an argument with a closure wrapped, so that stopped parameters have no gradient after it."""
        if not callable(closure):
            return closure

        @functools.wraps(closure)
        def inside(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            self._enforce(backward_is_done=False)
            return loss

        return inside

    def _enforce(self, *, backward_is_done: bool) -> None:
        woken = self.stops.enforce(whole=not self._is_linear)
        if woken:
            then = (
                "it is stopped in every step anew, but its gradient is computed in between. Switch only what trains "
                "(optimizer.gradskip.stopped), or give the optimizer model="
            )
            if self.model is not None:
                then = "from here on it is switched off before each training forward pass of the model"
                self._before_forward.watch_once(self.model)
            self.advice.say("woken", name=self.numbering.name(woken[0]), then=then)
        if self._expected and backward_is_done:  # the first step after a stop
            self.stops.look_at_user()
            alive = [n for n in sorted(self._expected) if self.stops.moves(n)]
            self._expected = set()
            lost = [self.numbering.name(n) for n in alive if self.parameters[n].grad is None]
            if lost:
                self.advice.say("lost", names=some(lost, 1))

    def _switch_off(self, args: Any, kwargs: Any) -> None:
        self.stops.switch_off()

    def _decide(self) -> Sequence[tuple[range, float]]:
        """Count the step, ask the rule if it is due, and return the positions whose update is scaled, with factors."""
        if self.machine.iteration >= self.due and self.machine.braking_through < 0:
            self._follow_user()
        machine, iteration = self.machine, self.machine.iteration
        if iteration < machine.quiet_until() and not self._holds_published():
            machine.iteration += 1
            if machine.iteration > self.due:
                self.refresh()
            return ()
        looks = machine.braking_through < 0 and machine.rule.looks_at(iteration)
        self._measured, self._ahead = self._ahead, {}
        plan = self._plan = machine.step(self._signal_of)
        if looks:
            self.signal.measured()
            self._look_for_still_ones(iteration)
        if plan.decision is not None:
            self.events.append(self.blueprint.event(iteration, plan.decision, self.settings))
            rates = [group["lr"] for group in self.optimizer.param_groups if "lr" in group]
            self.learning_rates = [lr.detach().clone() if isinstance(lr, Tensor) else lr for lr in rates]
        return plan.scaled

    def _look_for_still_ones(self, iteration: int) -> None:
        """Warn of a layer whose signal never changes, for which a rule waits in vain."""
        for position, signal in self._measured.items():
            before, since, looks = self._unchanged.get(position, (math.nan, 0, 0))
            since, looks = (since, looks + 1) if signal == before else (iteration, 1)
            self._unchanged[position] = signal, since, looks
            if looks >= 3 and iteration - since >= STILL_FOR:
                name = self.numbering.name(self._unit_at[position].number)
                self.advice.say("still", about=name, name=name)

    def _arrange(self, scaled: Sequence[tuple[range, float]]) -> None:
        """Exclude stopped parameters from this step, and multiply the updates of some positions."""
        order, parameters, reference = self.numbering.order, self.parameters, self.settings.reference
        factor_at: dict[int, float] = {}
        for positions, factor in scaled:
            numbers = (order[place] for place in positions)
            moving = (n for n in numbers if reference or not self.stops.holds(n))
            factor_at.update({id(parameters[n]): factor for n in moving})
        if not reference and not self._is_linear:
            found = [(p, factor_at[id(p)]) for p in parameters if id(p) in factor_at] if factor_at else []
            self._moved = [(p, p.detach().clone(), factor) for p, factor in found]
            return
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        outside = inside = groups, [group["params"] for group in groups]
        rates: list[Any] = []
        if reference:
            if scaled or self._holds_published():
                for place in range(self.machine.stopped_through + 1):
                    factor_at.setdefault(id(parameters[order[place]]), 0.0)
                rates = self.learning_rates
        elif self.stops.any:
            inside = groups, self.stops.moving_in(outside[1])
        if factor_at:
            split = split_groups(zip(*inside, strict=True), factor_at, rates or [group["lr"] for group in groups])
            inside = split, [group["params"] for group in split]
        if inside is not outside:
            self._outside, self._inside = outside, inside
            self._set_groups(inside)

    def _set_groups(self, wanted: Groups | None) -> None:
        if wanted is not None:
            groups, parameters = wanted
            if self.optimizer.param_groups is not groups:
                self.optimizer.param_groups = groups
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own

    def _put_groups_back(self) -> None:
        self._set_groups(self._outside)
        self._outside = self._inside = None

    def _finish(self) -> None:
        """Restore the groups, scale what the step has moved, and stop parameters whose last step it was."""
        self._put_groups_back()
        for parameter, before, factor in self._moved:
            scale_change(parameter, before, factor)
        plan, self._plan, self._moved = self._plan, None, []
        if plan is None:
            if self._busy and not self._clean:
                self.refresh()
            return
        try:
            if plan.stop_through is not None:
                if not self.settings.reference:
                    self._expected = {n for n, p in enumerate(self.parameters) if p.grad is not None}
                self._stop(plan.stop_through)
        finally:  # a warning may be an error
            self.refresh()

    def _stop(self, through: int) -> None:
        """Stop the parameters up to a position, and warn of what makes the stop save less than it could."""
        before = [p.requires_grad for p in self.parameters]
        numbering, stops = self.numbering, self.stops
        stops.stop(self.plan.order[: through + 1])
        self._tell_of_change(before)
        if stops.all:
            self.advice.say("all")
        self._advise_of_left()
        if numbering.wants_trace and numbering.trace is None and self.iteration > 0:
            way = "example_inputs= could not be run, as was warned of"
            self.advice.say("unseen", way=way if self._example_given else "Give example_inputs=")
        if self.process_group is None and _several_processes() and not numbering.is_sharded:
            self.advice.say("processes")

    def _tell_of_change(self, before: list[bool]) -> None:
        if before != [p.requires_grad for p in self.parameters]:
            for listener in self.on_stop:
                listener()
        if self.stops.reach_inputs:
            self.advice.say("inputs")

    def _forget_step(self) -> None:
        self._put_groups_back()
        self._plan, self._moved, self._expected = None, [], set()

    def can_stop_more(self) -> bool:
        return self.machine.braking_through >= 0 or self.machine.rule.next_due(self.machine.iteration) != NEVER

    # --- measurements for a decision --------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Measure what the next step's decision needs of weights, because other code changes them within the step."""
        if isinstance(self.signal, VarianceSignal) and self.machine.iteration >= self.due:
            self._ahead = self._measure(self._running_units())

    def _signal_of(self, position: int) -> float:
        if position not in self._measured:
            wanted = self._running_units() if self.signal.together else [self._unit_at[position]]
            self._measured.update(self._measure(wanted))
        return self._measured[position]

    def _measure(self, units: Sequence[Unit]) -> dict[int, float]:
        """Return the layers' signals by the position at which each ends."""
        if not units:
            return {}
        values = self.signal.measure(units)
        if self.process_group is not None:
            # All processes use the first one's numbers, so that rounding cannot stop a layer on some of them only.
            values = values.detach().clone()
            source = torch.distributed.get_global_rank(self.process_group, 0)
            torch.distributed.broadcast(values, source, group=self.process_group)
        numbers: list[float] = [float(values)] if len(values) == 1 else values.tolist()  # waits for the device
        for unit, number in zip(units, numbers, strict=True):
            for listener in self.on_measured:
                listener(unit, number)
        return {unit.end: number for unit, number in zip(units, numbers, strict=True)}

    def _running_units(self) -> list[Unit]:
        return [unit for unit in self.plan.units if unit.end > self.machine.stopped_through]

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.machine.iteration >= self.due and isinstance(self.signal, PlasticitySignal):
            self.signal.inputs = (args, kwargs)

    # --- the layers that the rule watches ---------------------------------------------------------------------------

    def begin_rule(self, ends: Collection[int] | None = None) -> None:
        """Watch the layers that the user trains, with a rule in its initial state.

        With ``ends``, those that end at these positions, as a saved run did; others are added at the next decision.
        """
        self._user_changes = self.stops.user_changes if ends is None else -1
        self._measured, self._ahead = {}, {}
        self.signal = make_signal(self.settings, self.parameters, self.model)
        self._watch(None if ends is None else lambda unit: unit.end in ends)
        if ends is None and self.machine.before_first is not None:
            self.stops.load_state_dict({"reasons": [0] * len(self.parameters)}, ())  # those of another order train
            self.events[:] = [self.blueprint.event(-1, self.machine.before_first, self.settings)]
            self._stop(self.stopped_through)

    def _watch(self, counts: Callable[[Unit], bool] | None = None) -> None:
        self.blueprint = blueprint_of(self.numbering, self.stops, counts)
        self.machine = self.blueprint.machine(self.settings)
        self._unit_at = {unit.end: unit for unit in self.plan.units}

    def _look_due(self) -> int:
        """Return the first iteration with anything to do, including a check of what the user has frozen."""
        due = self.machine.quiet_until()
        if self.settings.reference or self.settings.mode in ("off", "manual") or not self.stops.user_holds:
            return due
        # A rule with no layer left makes no decisions, but must notice layers that the user unfreezes.
        begin, interval = self.settings.looks
        begin = max(begin, self.machine.iteration)
        return min(due, -(-begin // interval) * interval)

    def _follow_user(self) -> None:
        """Update the rule's layers to those that the user trains now.

        It goes on with the next one of those that are left, or returns to one after the last stop that was unfrozen.
        """
        self.stops.look_at_user()
        if self.settings.reference or self.stops.user_changes == self._user_changes:
            return
        self._user_changes = self.stops.user_changes
        if self.settings.mode != "manual":  # which examines no layer
            rule = NAMED.get(self.settings.mode)
            # A schedule sets every layer's time at the start; a layer that is frozen later does not change it.
            kept = self.plan.units if rule is not None and not rule.is_measured else ()
            state = self.machine.state_dict()
            self._watch(lambda unit: unit in kept or is_watched(unit, self.numbering, self.stops))
            self.machine.load_state_dict(state)
            self.machine.rule.begin_after(self.machine.decided_through)
        self._advise_of_left()
        self.refresh()

    # --- numbers and execution order --------------------------------------------------------------------------------

    def _number(self) -> None:
        numbering = self.numbering = Numbering(self.optimizer.param_groups, self.model, self.settings, self._named_in)
        numbering.on_trace = self._take_trace
        self.stops = Stops(self.optimizer, numbering, self.settings)
        if self._example is not None and numbering.wants_trace:
            numbering.trace_example(self._example)
        self._earlier = [numbering.name(n) for n in self.stops.switched_on]
        self.begin_rule()
        self.refresh()

    def _record_first_pass(self) -> None:
        hidden = self._given_model is None or self._example_given or is_compiled(self._given_model)
        self._first_inputs.remove()
        if self.numbering.wants_trace and not hidden:
            if self.settings.prefix_mode == "eval" and self.machine.before_first is not None and self.model is not None:
                self._first_inputs.watch(self.model)  # what the prefix is counts in that pass already
            self.numbering.record_first_pass()
        self.refresh()

    def _trace_first_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._first_inputs.remove()
        self.numbering.trace_inputs(args, kwargs)

    def bind(self) -> None:
        """Renumber the optimizer's parameters before the first step, after a group was added."""
        self.numbering.stop_recording()
        self._number()
        self._record_first_pass()

    def _take_trace(self) -> None:
        if self.machine.iteration == 0:
            self.numbering.order_by_trace()
            self.begin_rule()
        self.refresh()

    def _advise_of_left(self) -> None:
        if not (left := self.left_upstream()):
            return
        ways = []
        if not self.settings.whole_units and self.numbering.plan(lambda _: True).units:
            ways.append("CAC_WHOLE_UNITS=1 stops layers with their norms in execution order")
        if self.settings.prefix_autograd:
            ways.append("CAC_PREFIX_AUTOGRAD=0 stops whatever is left")
        self.advice.say("left", about=",".join(left), names=some(left, 5), ways="; ".join(ways))


def _several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
