"""The interface of stop rules: pure state machines that name a layer to stop. No torch, no clock, no environment.

A rule is asked once a step and may name one layer to stop. It sees weight variances or other signals only through a
function, so the same object runs inside an optimizer (which computes a variance) and over a recorded trace (which
looks it up). Layers are positions, see `layers`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

#: Gives a layer's signal (for the published rule its unbiased weight variance), by position, at the step in question.
SignalOf = Callable[[int], float]

#: An iteration that no run reaches.
NEVER = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A rule's word that a layer is to stop."""

    layer: int
    """Position of the parameter; it and every one before it stop."""
    rule: str
    """``start``, ``mountain``, ``slope``, ``manual``, or the rule's name."""
    ratio: float | None
    """Number that the threshold was compared with, such as variance over its peak; None where nothing is measured."""
    index: int = field(default=0, compare=False)
    """Place of the stop in a manual list, from 0."""


class StopRule(Protocol):
    """A rule that decides which layer stops when. One call a step, with ascending iterations."""

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        """Return the layer whose stop is decided at the start of this step, or None."""

    def next_due(self, iteration: int) -> int:
        """Return the first iteration from this one on at which `decide` may do anything; `NEVER` if none."""

    def first_stop(self) -> int:
        """Return the earliest iteration at which this rule, not yet begun, can decide a stop; `NEVER` if none."""

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        """(position through which, factor on the learning rate) of layers that still train, ascending; mostly none."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's whole state, in plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this rule, of the same layers or of others."""

    def begin_after(self, through: int) -> None:
        """Decide next about the first layer after a position; -1 for the first of all.

        Called where the layers, or what has stopped of them, are not those of the rule's own past: a state of another
        rule was loaded, or the user has frozen or unfrozen layers.
        """


class InOrder:
    """The part of a rule that decides about its targets one after the other, from the front.

    Args:
        targets: positions at which layers end, ascending.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self.targets = tuple(targets)
        self.position = 0
        """Index of the next target; their number when none is left."""

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def begin_after(self, through: int) -> None:
        position = bisect_right(self.targets, through)
        if position != self.position:
            self.position = position
            self.forget_target()

    def forget_target(self) -> None:
        """Forget what was measured of the current target: it is another one."""

    def target_state(self) -> dict[str, Any]:
        """Return the current target by its position, which a rule of other targets understands; None for none left."""
        return {"target": self.targets[self.position] if self.position < len(self.targets) else None}

    def load_target(self, state: dict[str, Any]) -> bool:
        """Take the target of `target_state`, or the next one after it; whether it is the same."""
        target = state["target"]
        self.position = len(self.targets) if target is None else bisect_left(self.targets, int(target))
        return self.target_state() == {"target": target}


class OffRule:
    """Stops nothing."""

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
