"""State machine of a rule with braking: one call per step returns the optimizer's work in it. Pure, without torch."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# --- Braking distance: the learning rate of a layer about to stop falls to zero first ---------------------------------
# With braking distance D the step of the stop decision and the D - 1 after it multiply the learning rate by
# (c / D)^2 with c = D - 1, D - 2, ..., 0; at c = 0 the layer stops (published rule, `CAC_BRAKING_DISTANCE`).


def first_step_after(decided: Iterations, distance: Iterations) -> Iterations:
    """Return the first step without the stopped layers' gradients, from the step of the decision.

    Until then no other stop is decided, or in that same step at the earliest.
    """
    return decided + distance + (distance == 0)


def braking_factor(count: int, distance: int) -> float:
    """Return the factor on the learning rate with ``count`` braking steps left after this one, in [0, 1).

    >>> [braking_factor(c, 4) for c in (3, 2, 1, 0)]
    [0.5625, 0.25, 0.0625, 0.0]
    """
    return float(pow(count / distance, 2))


# --- Interface of stop rules: pure state machines that name a layer to stop. No torch, no clock, no environment
# A rule is called once per step and may name one layer to stop. It reads weight variances or other signals only through
# a function, so the same object works inside an optimizer (which computes a variance) and in a replay of a recorded
# trace (which looks it up). Layers are given as positions, see `layers`.

#: Returns a layer's signal (for the published rule its unbiased weight variance) at the current step, by position.
SignalOf = Callable[[int], float]

#: An iteration, or an array of iterations.
Iterations = TypeVar("Iterations", int, "NDArray[np.int64]")

#: An iteration that no run reaches.
NEVER = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A rule's decision to stop a layer."""

    layer: int  # position of the parameter; it and every one before it stop
    rule: str  # ``start``, ``mountain``, ``slope``, ``manual``, or the rule's name
    ratio: float | None
    """Number that was compared with the threshold, such as variance over its peak; None where nothing is measured."""
    index: int = field(default=0, compare=False)  # place of the stop in a manual list, from 0


class StopRule:
    """Rule that decides which layer stops when, called once per step with ascending iterations; this one stops none."""

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        """Return the decision to stop a layer at the start of this step, or None."""
        return None

    def next_due(self, iteration: int) -> int:
        """Return the first iteration, from this one on, at which `decide` may do anything; `NEVER` if none."""
        return NEVER

    def looks_at(self, iteration: int) -> bool:
        """Return whether `decide` may read signals in this step."""
        return self.next_due(iteration) == iteration

    def first_stop(self) -> int:
        """Return the earliest iteration at which this rule can decide a stop after construction; `NEVER` if none."""
        return NEVER

    def before_first_step(self) -> Decision | None:
        """Return the decision to stop a layer before anything is trained, once; None if there is none."""
        return None

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        """Return (last position, factor on the learning rate) of layers that still train, ascending; mostly empty."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's complete state, in plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this rule, of the same layers or of others."""

    def begin_after(self, through: int) -> None:
        """Continue with the first layer after a position (-1: none), as the user has frozen or unfrozen layers."""


class Gathered(StopRule):
    """Rule whose decisions wait for the next iteration that is a multiple of an interval (`CAC_STOP_INTERVAL`).

    Meanwhile it goes on to decide about later layers; what is decided then is one stop, through the last of them.
    """

    def __init__(self, rule: InOrder, interval: int) -> None:
        self.rule, self.interval = rule, interval
        self.waiting: Decision | None = None

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        self.waiting = self.rule.decide(iteration, signal_of) or self.waiting
        if iteration % self.interval:
            return None
        found, self.waiting = self.waiting, None
        return found

    def next_due(self, iteration: int) -> int:
        due = self.rule.next_due(iteration)
        return due if self.waiting is None else min(due, self._turn(iteration))

    def looks_at(self, iteration: int) -> bool:
        return self.rule.looks_at(iteration)

    def _turn(self, iteration: int) -> int:
        return -(-iteration // self.interval) * self.interval

    def first_stop(self) -> int:
        first = self.rule.first_stop()
        return first if first == NEVER else self._turn(first)

    def state_dict(self) -> dict[str, Any]:
        waiting = self.waiting
        return {
            **self.rule.state_dict(),
            "waiting": None if waiting is None else [waiting.layer, waiting.rule, waiting.ratio],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state)
        waiting = state.get("waiting")  # there is none in a state of the same rule without this
        self.waiting = None if waiting is None else Decision(layer=waiting[0], rule=waiting[1], ratio=waiting[2])
        self._keep_after(-1)

    def begin_after(self, through: int) -> None:
        self._keep_after(through)
        self.rule.begin_after(through if self.waiting is None else self.waiting.layer)

    def _keep_after(self, through: int) -> None:
        """Let what waits end at a target, for the user may have frozen the one at which it ended."""
        if self.waiting is not None:
            ends = [target for target in self.rule.targets if through < target <= self.waiting.layer]
            self.waiting = replace(self.waiting, layer=ends[-1]) if ends else None


class InOrder(StopRule):
    """Base of rules that decide about their targets one after the other, from the front.

    Args:
        targets: positions at which layers end, ascending.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self.targets = tuple(targets)
        self.position = 0  # index of the next target; the number of targets when none is left

    def begin_after(self, through: int) -> None:
        position = bisect_right(self.targets, through)
        if position != self.position:
            self.position = position
            self.forget_target()

    def forget_target(self) -> None:
        """Forget the measurements of the current target, because the target changes."""

    def stop_target(self) -> int:
        target = self.targets[self.position]
        self.position += 1
        self.forget_target()
        return target

    @property
    def target(self) -> int | None:
        return self.targets[self.position] if self.position < len(self.targets) else None

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_target(state)

    def load_target(self, state: dict[str, Any]) -> bool:
        """Set the target of a state, perhaps of other targets, or the next after it; return whether it is the same."""
        target = state["target"]
        self.position = len(self.targets) if target is None else bisect_left(self.targets, int(target))
        return bool(self.target == target)


class NamedRule(InOrder):
    """Base of the rules that ``CAC_RULE`` names, one class a file of this folder; `choice.NAMED` finds them.

    Args:
        settings: its numbers.
        targets: positions at which the watched layers end, ascending.
        stoppable: how many of them, from the front, may stop.
    """

    name: ClassVar[str]  # value of ``CAC_RULE``; the file's stem
    decides_by: ClassVar[str]  # deciding quantity in words, for the help of ``CAC_RULE``
    reads: ClassVar[tuple[str, ...]]  # fields of `Settings` that it reads; with ``rule_end_itr``, that must be set
    searched: ClassVar[tuple[tuple[Any, ...], ...]] = ()
    """Ranges of the space ``stop_rules``: field, low, high and perhaps ``"log"``; of the start, shares of the run.
    Flags, end, interval and a start without one need none."""
    is_measured: ClassVar[bool] = False
    """True if it reads measurements of its own (`signals`), from ``rule_start_itr`` on, every ``rule_interval``."""
    brakes: ClassVar[bool] = True  # true if `CAC_BRAKING_DISTANCE` may be set
    scales_every_step: ClassVar[bool] = False
    """True if `factors` changes learning rates from the first step on, so that its runs share no step."""

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(targets[:stoppable])


class ScheduledRule(NamedRule):
    """Base of rules that stop each layer at an iteration of its own."""

    ends: Sequence[float]  # iterations, ascending; the first ``stoppable`` of them are stops
    stoppable: int

    def first_stop(self) -> int:
        return math.ceil(self.ends[0]) if self.stoppable else NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        due = bisect_right(self.ends, iteration, self.position, self.stoppable)
        if due == self.position:
            return None
        self.position = due
        return Decision(layer=self.targets[due - 1], rule=self.name, ratio=None)

    def next_due(self, iteration: int) -> int:
        return max(iteration, math.ceil(self.ends[self.position])) if self.position < self.stoppable else NEVER


class MeasuredRule(NamedRule):
    """Base of rules that measure at ``start`` and every ``interval`` iterations after it, while targets are left."""

    is_measured = True

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, stoppable)
        self.start = settings.rule_start_itr
        self.interval = settings.rule_interval

    def next_due(self, iteration: int) -> int:
        if self.position == len(self.targets):
            return NEVER
        missed = max(0, iteration - self.start)
        return self.start + -(-missed // self.interval) * self.interval


# --- State machine of a rule with braking -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Work of one optimizer step in addition to its ordinary update."""

    decision: Decision | None = None  # a stop decided at the start of this step
    scaled: tuple[tuple[range, float], ...] = ()
    """Positions whose update is multiplied in this step, with the factor: [0, 1) while braking."""
    stop_through: int | None = None  # the parameters at positions 0..this need no gradient after this step's update


#: Plan of a step with nothing to do: a single object, so that an ordinary step allocates nothing.
ORDINARY = StepPlan()


class SkipMachine:
    """State machine that counts iterations, asks the rule, brakes and stops; decides no stop while a layer brakes."""

    def __init__(self, settings: Any, rule: StopRule) -> None:
        self.rule = rule
        self.distance = settings.braking_distance
        self.iteration = 0  # steps begun so far; the next step has this number
        self.before_first = rule.before_first_step()  # a stop that is made already
        # Position of the last stopped parameter, -1 for none.
        self.stopped_through = -1 if self.before_first is None else self.before_first.layer
        self.braking_through = -1  # position of the last braking parameter while a layer brakes, else -1
        self.braking_count = 0

    def step(self, signal_of: SignalOf) -> StepPlan:
        """Begin step number `iteration` and return its plan."""
        iteration = self.iteration
        self.iteration += 1
        decision = None
        scaled: tuple[tuple[range, float], ...] = ()
        if self.braking_through < 0:
            scaled = self._scaled_by_rule(iteration)
            decision = self.rule.decide(iteration, signal_of)
            if decision is None:
                return StepPlan(scaled=scaled) if scaled else ORDINARY
            self.braking_through, self.braking_count = decision.layer, self.distance
        if self.braking_count > 0:
            self.braking_count -= 1
            braking = range(self.stopped_through + 1, self.braking_through + 1)
            # Braking may have begun under other settings, with a distance.
            scaled = ((braking, braking_factor(self.braking_count, self.distance or 1)),)
        if self.braking_count > 0:
            return StepPlan(decision=decision, scaled=scaled)
        self.stopped_through, self.braking_through = self.decided_through, -1
        return StepPlan(decision=decision, scaled=scaled, stop_through=self.stopped_through)

    def _scaled_by_rule(self, iteration: int) -> tuple[tuple[range, float], ...]:
        scaled = []
        begin = self.stopped_through + 1
        for through, factor in self.rule.factors(iteration):
            scaled.append((range(begin, through + 1), factor))
            begin = through + 1
        return tuple(scaled)

    def quiet_until(self) -> int:
        """Return the first step with anything to do; before it, `step` would return `ORDINARY` and only count."""
        return self.iteration if self.braking_through >= 0 else self.rule.next_due(self.iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, in plain numbers."""
        return {
            "iteration": self.iteration,
            "stopped_through": self.stopped_through,
            "braking_through": self.braking_through,
            "braking_count": self.braking_count,
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        self.stopped_through = int(state["stopped_through"])
        self.braking_through = int(state["braking_through"])
        self.braking_count = min(int(state["braking_count"]), self.distance or 1)
        if state["rule"]:  # one without layers has no state
            self.rule.load_state_dict(state["rule"])

    @property
    def decided_through(self) -> int:
        """Return the position of the last parameter with a decided stop, braking parameters included; -1 for none."""
        return max(self.stopped_through, self.braking_through)
