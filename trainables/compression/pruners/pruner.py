"""Base of all pruners.

Shapes: a mask has its weight's shape and dtype; 0 removes an element, 1 keeps it (a Bernoulli mask may have values
above 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainables.compression.masks import parameters_as_built
from trainables.compression.schedule.names import assigned, listed
from trainables.compression.schedule.timing import Moment


class Pruner(ABC):
    """Decide which elements of some weights are zero.

    Args:
        settings: one of `trainables.compression.schedule.configs.PRUNERS`.
        model: the model to prune.
        generator: on the CPU, for all random numbers.

    Raises:
        UserError: a name matches no parameter, or a weight does not have the requested structures.
    """

    argument: ClassVar[str] = "weights"
    """The argument that names parameters, in a list or with a value each."""
    epochs_before: ClassVar[int] = 0
    """Number of epochs before the first active one at which the pruner starts to observe training (`start`)."""

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        names = tuple(parameters_as_built(model))
        given = getattr(settings, self.argument)
        self.settings = settings
        self.values: dict[str, Any] = (
            assigned(given, names) if isinstance(given, Mapping) else dict.fromkeys(listed(given, names))
        )
        """Value of the argument by parameter name, None if it has no values."""
        self.targets = tuple(self.values)
        """Parameter names, at least one."""

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
