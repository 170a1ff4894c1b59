"""Interface of stop rules: pure state machines that name a layer to stop. No torch, no clock, no environment.

A rule is called once per step and may name one layer to stop. It reads weight variances or other signals only through
a function, so the same object works inside an optimizer (which computes a variance) and in a replay of a recorded
trace (which looks it up). Layers are given as positions, see `layers`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Returns a layer's signal (for the published rule its unbiased weight variance) at the current step, by position.
SignalOf = Callable[[int], float]

#: An iteration, or an array of iterations.
Iterations = TypeVar("Iterations", int, "NDArray[np.int64]")

#: An iteration that no run reaches.
NEVER = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A rule's decision to stop a layer."""

    layer: int
    """Position of the parameter; it and every one before it stop."""
    rule: str
    """``start``, ``mountain``, ``slope``, ``manual``, or the rule's name."""
    ratio: float | None
    """Number that was compared with the threshold, such as variance over its peak; None where nothing is measured."""
    index: int = field(default=0, compare=False)
    """Place of the stop in a manual list, from 0."""


class StopRule(Protocol):
    """Rule that decides which layer stops when. It is called once per step, with ascending iterations."""

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        """Return the decision to stop a layer at the start of this step, or None."""

    def next_due(self, iteration: int) -> int:
        """Return the first iteration, from this one on, at which `decide` may do anything; `NEVER` if none."""

    def first_stop(self) -> int:
        """Return the earliest iteration at which this rule can decide a stop after construction; `NEVER` if none."""

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        """Return (last position, factor on the learning rate) of layers that still train, ascending; mostly empty."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's complete state, in plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this rule, of the same layers or of others."""

    def begin_after(self, through: int) -> None:
        """Continue with the first layer after a position; -1 for the first layer of all.

        Called where the layers or their stops differ from those that the rule has seen: a state of another rule was
        loaded, or the user has frozen or unfrozen layers.
        """


class InOrder:
    """Base of rules that decide about their targets one after the other, from the front.

    Args:
        targets: positions at which layers end, ascending.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self.targets = tuple(targets)
        self.position = 0
        """Index of the next target; the number of targets when none is left."""

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def begin_after(self, through: int) -> None:
        position = bisect_right(self.targets, through)
        if position != self.position:
            self.position = position
            self.forget_target()

    def forget_target(self) -> None:
        """Forget the measurements of the current target, because the target changes."""

    def target_state(self) -> dict[str, Any]:
        """Return the current target by its position, which a rule with other targets can read; None if none is left."""
        return {"target": self.targets[self.position] if self.position < len(self.targets) else None}

    def load_target(self, state: dict[str, Any]) -> bool:
        """Set the target of `target_state`, or the next one after it; return whether it is the same."""
        target = state["target"]
        self.position = len(self.targets) if target is None else bisect_left(self.targets, int(target))
        return self.target_state() == {"target": target}


class OffRule:
    """Rule that stops nothing."""

    def first_stop(self) -> int:
        return NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        return None

    def next_due(self, iteration: int) -> int:
        return NEVER

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def begin_after(self, through: int) -> None:
        pass
