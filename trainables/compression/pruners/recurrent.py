"""Pruning of recurrent networks with a threshold that rises along two straight lines (Narang et al. 2017, sec. 3).

Symbols: S, E, f starting epoch, ending epoch and frequency of the policy; R the ramp's epoch; q the 90th percentile of
|w| of a trained dense network; theta and phi the slopes of the first and the second line; t the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.pruners.thresholds import threshold_mask
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError


def ramp_threshold(epoch: int, timing: Timing, *, q: float, ramp_epoch: int, slope_factor: float) -> float:
    """Return t: theta (e - S + 1) / f before epoch R, theta (R - S + 1) / f + phi (e - R + 1) / f from R on.

    theta = 2 q f / (2 (R - S) + 3 (E - R)) (their eq. 1), phi = slope_factor theta.

    Args:
        epoch: e, an active one.
        timing: of the policy.
        q: as above, > 0.
        ramp_epoch: R, in [S, E].
        slope_factor: phi over theta; 1.5 to 2 in the paper.

    Raises:
        UserError: R is so far outside of the policy's epochs that theta is not a positive number. In a strict schedule
            R is inside; a published one starts its policy after R, so that the second line applies from the start.
    """
    start, end, frequency = timing.starting_epoch, timing.ending_epoch, timing.frequency
    if 2 * (ramp_epoch - start) + 3 * (end - ramp_epoch) <= 0:
        raise UserError(
            f"ramp_epoch must be between the policy's starting_epoch {start} and ending_epoch {end}, got {ramp_epoch}"
        )
    theta = 2 * q * frequency / (2 * (ramp_epoch - start) + 3 * (end - ramp_epoch))
    if epoch < ramp_epoch:
        return theta * (epoch - start + 1) / frequency
    return (theta * (ramp_epoch - start + 1) + slope_factor * theta * (epoch - ramp_epoch + 1)) / frequency


class RecurrentPruner(Pruner):
    """Zero elements whose absolute value is at most `ramp_threshold`.

    Args:
        targets: parameter names.
        q: as above, > 0.
        ramp_from: returns R for S.
        slope_factor: phi over theta, > 0.
    """

    def __init__(
        self, targets: Sequence[str], *, q: float, ramp_from: Callable[[int], int], slope_factor: float
    ) -> None:
        self.targets = tuple(targets)
        self._q, self._ramp_from, self._slope_factor = q, ramp_from, slope_factor

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        threshold = ramp_threshold(
            moment.epoch,
            moment.timing,
            q=self._q,
            ramp_epoch=self._ramp_from(moment.timing.starting_epoch),
            slope_factor=self._slope_factor,
        )
        return {name: threshold_mask(weights[name], threshold) for name in self.targets}
