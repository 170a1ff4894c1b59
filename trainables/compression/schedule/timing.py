"""Active epochs of a policy, the position of a moment among them, and a share that grows with it. Without torch.

Symbols: e epoch, from 0; S, E, f starting epoch, ending epoch (exclusive) and frequency of a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainables.errors import UserError

#: Largest number of epochs; a larger number is a mistake, or means "until the end".
MOST_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A policy's epochs, given as ``epochs`` or as a range.

    UserError: there is no epoch, an epoch is negative or beyond `MOST_EPOCHS`, or the frequency is below 1.
    """

    starting_epoch: int = 0  # first active epoch, >= 0
    ending_epoch: int = 1  # end of the range of active epochs, exclusive
    frequency: int = 1  # distance between active epochs, >= 1
    epochs: tuple[int, ...] | None = None
    """List of the active epochs, ascending; the range is then derived from the first and the last."""

    def __post_init__(self) -> None:
        if self.epochs is not None:
            if not self.epochs or any(e < 0 for e in self.epochs) or list(self.epochs) != sorted(set(self.epochs)):
                raise UserError(f"epochs must be ascending numbers >= 0, each once, got {list(self.epochs)}")
            object.__setattr__(self, "starting_epoch", self.epochs[0])
            object.__setattr__(self, "ending_epoch", self.epochs[-1] + 1)
        if self.starting_epoch < 0:
            raise UserError(f"starting_epoch must be >= 0, got {self.starting_epoch}")
        if self.frequency < 1:
            raise UserError(f"frequency must be >= 1, got {self.frequency}")
        if self.ending_epoch > MOST_EPOCHS:
            key = "ending_epoch" if self.epochs is None else "epochs"
            raise UserError(f"{key} must be at most {MOST_EPOCHS}, got {self.ending_epoch}")
        if self.ending_epoch <= self.starting_epoch:
            raise UserError(
                f"ending_epoch must be above starting_epoch {self.starting_epoch} (the end is exclusive), "
                f"got {self.ending_epoch}"
            )

    def active_epochs(self) -> Sequence[int]:
        """Return all active epochs, ascending; at least one."""
        return self.epochs or range(self.starting_epoch, self.ending_epoch, self.frequency)

    def is_active(self, epoch: int) -> bool:
        """Return whether the policy acts in this epoch."""
        return epoch in self.active_epochs()

    @property
    def last_epoch(self) -> int:
        """Return the last active epoch."""
        return self.active_epochs()[-1]

    def progress(self, epoch: int) -> float:
        """Return the position of an active epoch between the first (0) and the last (1); 1 if there is only one.

        In a range: (e - S) / (floor((E - S - 1) / f) f). In a list of epochs: by index, not by distance.
        """
        if self.last_epoch == self.starting_epoch:
            return 1.0
        if self.epochs is not None:
            return self.epochs.index(epoch) / (len(self.epochs) - 1)
        return (epoch - self.starting_epoch) / (self.last_epoch - self.starting_epoch)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a training run, relative to a policy's timing."""

    epoch: int  # from 0
    timing: Timing
    minibatch: int = 0  # optimizer steps since the start of the epoch
    minibatches_per_epoch: int = 1  # optimizer steps of an epoch, >= 1

    @property
    def progress(self) -> float:
        """Return the position of the epoch among the policy's active epochs, in [0, 1]."""
        return self.timing.progress(self.epoch)
