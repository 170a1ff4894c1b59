"""Interventions of methods on a training run, the only difference between trials. Pure, without torch.

Symbols: i iteration (optimizer steps executed before, from 0); an intervention at i changes the step from state i to
state i+1 and all later ones, so state i depends only on the root and on interventions before i.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """One action of a method at one iteration."""

    iteration: int
    """First step that it changes, from 0."""
    action: str
    """Canonical JSON of everything on which later training depends; equal texts have equal effects."""


def action_text(values: Mapping[str, Any]) -> str:
    """Return an action as canonical JSON."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def child_id(stage: str, intervention: Intervention) -> str:
    """Return the id of the stage that an intervention leads to: a digest of its parent's id and the intervention."""
    text = f"{stage}\n{intervention.iteration}\n{intervention.action}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class MissingSignal(LookupError):
    """A stage was trained without recording a signal that the rule reads."""


class Recorded(Protocol):
    """Recorded signals of a stage."""

    def at(self, name: str, iteration: int) -> float:
        """Return the signal of that name at an iteration; raise MissingSignal if it was not recorded."""


class MethodReplay(Protocol):
    """A method's configuration, replayed over recorded training instead of trained.

    It determines what the method would do next: `advance` replays a stage until the method acts there.
    """

    kind: str
    """Kind of the method's own state that a checkpoint must contain besides the rule's; ``any`` for none."""
    first_stage_only: bool
    """True if the run can be continued only from checkpoints before its first intervention."""

    @property
    def iteration(self) -> int:
        """Return the next step to replay."""

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        """Replay up to iteration ``until``, or through the first step at which the method acts; return what it does.

        Raises:
            MissingSignal: a signal was not recorded; `iteration` is then the step where it is missing.
        """

    def is_quiet(self) -> bool:
        """Return whether the method certainly does nothing in the next step, without reading a signal."""

    def columns(self) -> dict[str, Any]:
        """Return the method's own result columns at this point."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the replay, in plain types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""


class PlannedActs:
    """Replay of a method whose interventions, ascending and at most one an iteration, are known before the training."""

    kind = "any"
    first_stage_only = False

    def __init__(self, acts: Sequence[Intervention], columns: Mapping[str, Any]) -> None:
        self._acts = acts
        self._columns = dict(columns)
        self.iteration = 0

    def next_action(self) -> int | None:
        """Return the iteration of the next intervention; None if there is none."""
        return next((act.iteration for act in self._acts if act.iteration >= self.iteration), None)

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        for act in self._acts:
            if self.iteration <= act.iteration < until:
                self.iteration = act.iteration + 1
                return act
        self.iteration = max(self.iteration, until)
        return None

    def is_quiet(self) -> bool:
        return self.next_action() != self.iteration

    def columns(self) -> dict[str, Any]:
        return dict(self._columns)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iteration = int(state["iteration"])
