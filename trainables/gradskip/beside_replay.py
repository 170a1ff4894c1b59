"""Joint replay of Gradient-Skip and a method whose acts are known, over recorded training. Does not import torch.

Gradient-Skip decides by the weights after the previous step; the other method acts later in the step. So both use the
same state, and if both act in one step, it is one intervention.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from trainables.interventions import Intervention, MethodReplay, Recorded, action_text


class KnownActs(MethodReplay, Protocol):
    """A replay that can say when it acts next."""

    iteration: int

    def next_action(self) -> int | None:
        """Return the iteration of the next intervention; None if there is none."""


class JointReplay:
    """Both replays, always at the same iteration.

    Args:
        gradskip: Gradient-Skip's.
        other: the other method's.
        name: of the other method, in states.
    """

    def __init__(self, gradskip: MethodReplay, other: KnownActs, name: str) -> None:
        self.gradskip, self.other, self._name = gradskip, other, name
        self.kind = self.gradskip.kind
        self.first_stage_only = self.gradskip.first_stage_only

    @property
    def iteration(self) -> int:
        return self.gradskip.iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        while self.iteration < until:
            acts = self.other.next_action()
            # Before the step in which the other acts, only Gradient-Skip is replayed; in that step both are.
            end = until if acts is None else min(until, max(acts, self.iteration + 1))
            if acts == self.iteration:
                before = self.gradskip.state_dict()
                try:
                    stop = self.gradskip.advance(recorded, acts + 1)
                    act = self.other.advance(recorded, acts + 1)
                except BaseException:
                    self.gradskip.load_state_dict(before)
                    raise
                assert act is not None
                return act if stop is None else _both(act, stop)
            try:
                stop = self.gradskip.advance(recorded, end)
            finally:
                self.other.iteration = self.gradskip.iteration
            if stop is not None:
                return stop
        return None

    def is_quiet(self) -> bool:
        return self.gradskip.is_quiet() and self.other.is_quiet()

    def columns(self) -> dict[str, Any]:
        return self.gradskip.columns()

    def state_dict(self) -> dict[str, Any]:
        return {**self.gradskip.state_dict(), self._name: self.other.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gradskip.load_state_dict(state)
        self.other.load_state_dict(state[self._name])


def _both(act: Intervention, stop: Intervention) -> Intervention:
    return Intervention(
        iteration=act.iteration, action=action_text({**json.loads(act.action), **json.loads(stop.action)})
    )
