"""Interface of pruners that the scheduler uses.

Shapes: a mask has its weight's shape and dtype; 0 removes an element, 1 keeps it (a Bernoulli mask may have values
above 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainables.compression.schedule.timing import Moment


class Pruner(ABC):
    """Decide which elements of some weights are zero."""

    targets: tuple[str, ...]
    """Parameter names, in the schedule's order; at least one."""
    epochs_before: int = 0
    """Number of epochs before the first active one at which the pruner starts to observe training (`start`)."""

    @abstractmethod
    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        """Return new masks.

        Args:
            weights: of all targets, detached.
            current: the masks of targets that have one.
            moment: a moment of an active epoch.

        Returns:
            Masks by name, for the targets whose mask changes.
        """

    def start(self, model: nn.Module) -> None:  # noqa: B027  # most look at weights alone
        """Start observing training with hooks; called at the start of an epoch, and again after loading a state."""

    def stop(self) -> None:  # noqa: B027
        """Stop observing training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore a saved state."""
