"""What makes trials differ: the interventions of their methods on a training run. Pure, without torch.

Symbols: i iteration (optimizer steps executed before, from 0); an intervention at i changes the step from state i to
state i+1 and what follows, so state i depends on the root and on interventions before i alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """One action of a method at one iteration."""

    iteration: int
    """The step that it changes first, from 0."""
    action: str
    """All that the training after it depends on, as canonical JSON; equal text, equal effect."""


def action_text(values: Mapping[str, Any]) -> str:
    """An action in its canonical form."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def child_id(stage: str, intervention: Intervention) -> str:
    """The stage that an intervention leads to: a digest of all that came before and of this."""
    text = f"{stage}\n{intervention.iteration}\n{intervention.action}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class MissingSignal(LookupError):
    """The stage was trained without recording what this rule looks at."""


class Recorded(Protocol):
    """What was recorded of a stage."""

    def at(self, name: str, iteration: int) -> float:
        """The signal of that name at an iteration; MissingSignal if it was not recorded."""


class MethodReplay(Protocol):
    """A method's configuration, followed over recorded training instead of trained.

    It says what the method would do next: `advance` goes on over a stage until the method acts there.
    """

    kind: str
    """Which state of its own the method needs in a checkpoint besides the rule's; ``any`` for none."""
    first_stage_only: bool
    """Whether the run may be continued only from checkpoints before its first intervention."""

    @property
    def iteration(self) -> int:
        """The next step to look at."""

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        """Go on to iteration ``until``, or through the first step at which the method acts.

        Returns:
            The intervention, `iteration` then standing behind it; None if there was none.

        Raises:
            MissingSignal: `iteration` then stands at the step whose signal is missing.
        """

    def is_quiet(self) -> bool:
        """Whether the method certainly does nothing in the next step, said without looking at a signal."""

    def columns(self) -> dict[str, Any]:
        """The method's own result columns at this point."""

    def state_dict(self) -> dict[str, Any]:
        """Where the method stands, in plain types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there."""


class NeverActs:
    """The replay of plain training."""

    kind = "any"
    first_stage_only = False

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = dict(columns)
        self.iteration = 0

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        self.iteration = max(self.iteration, until)
        return None

    def is_quiet(self) -> bool:
        return True

    def columns(self) -> dict[str, Any]:
        return dict(self._columns)

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iteration = int(state["iteration"])
