"""What the scheduler asks of pruners, regularizers and quantizers.

Shapes: a mask has its weight's shape and dtype; 0 removes an element, 1 keeps it (a Bernoulli mask may keep by more).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.compression.schedule.timing import Moment


class Pruner(ABC):
    """Decides which elements of some weights are zero."""

    targets: tuple[str, ...]
    """Parameter names, in the order in which the schedule means them; at least one."""
    epochs_before: int = 0
    """Epochs before the first active one from which on the pruner must see the training (`start`)."""

    @abstractmethod
    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        """New masks.

        Args:
            weights: of all targets, detached.
            current: their masks where they have one.
            moment: in the policy's time; an active epoch.

        Returns:
            By name, for the targets whose mask is another now.
        """

    def start(self, model: nn.Module) -> None:  # noqa: B027  # most look at weights alone
        """See the training from here on (hooks); called at an epoch's begin, and again after loading a state."""

    def stop(self) -> None:  # noqa: B027
        """See nothing any more."""

    def state_dict(self) -> dict[str, Any]:
        """Memory in plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on from there."""


class Regularizer(ABC):
    """Adds a term to the loss, and may zero what has become small."""

    targets: tuple[str, ...]
    """Parameter names; at least one."""
    thresholds: bool = False
    """Whether `masks` finds anything: there is a threshold criterion."""

    @abstractmethod
    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The term, a scalar that gradients flow through; no synchronization with the device."""

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masks of what the threshold criterion zeroes after a step; empty without one. No synchronization."""
        return {}


class Quantizer(ABC):
    """Changes modules of one model so that they compute with few bits. Nothing is changed on a class."""

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Change the model's modules in place (parametrizations, replaced activations); learned parameters join the
        optimizer. Parameters stay the same objects."""

    def finish_epoch(self, model: nn.Module) -> None:  # noqa: B027  # post-training quantization has an end
        """The last step of an active epoch is done."""

    def state_dict(self) -> dict[str, Any]:
        """Memory that is not in the model's own state, in plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on from there; the model is prepared already."""
