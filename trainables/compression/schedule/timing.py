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
        """Return the position of an active epoch, by index, from the first (0) to the last (1); 1 if it is alone."""
        active = self.active_epochs()
        return active.index(epoch) / (len(active) - 1) if len(active) > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a training run, relative to a policy's timing."""

    epoch: int  # from 0
    timing: Timing
    minibatch: int = 0  # optimizer steps since the start of the epoch
    minibatches_per_epoch: int = 1  # optimizer steps of an epoch, >= 1


def gradual_share(initial: float, final: float, progress: float) -> float:
    """Return s = s_f + (s_i - s_f) (1 - p)^3 (Zhu & Gupta 2017, eq. 1), p from 0 in the first active epoch to 1.

    >>> [round(gradual_share(0.05, 0.8, p), 4) for p in (0, 0.25, 0.5, 0.75, 1)]
    [0.05, 0.4836, 0.7063, 0.7883, 0.8]
    """
    left = (1 - progress) ** 3
    return left * initial + (1 - left) * final  # exact at both ends
