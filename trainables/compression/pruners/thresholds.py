"""Pruning of elements or structures that are not above a threshold.

Symbols: w a weight, s sensitivity, t threshold; a mask keeps |w| > t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.structures import Structures
from trainables.errors import UserError


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Return ones where |w| > t, else zeros, of the weight's shape, type and device; a NaN counts as large."""
    return (~(weight.detach().abs() <= threshold)).to(weight.dtype)


def deviation(weight: Tensor) -> float:
    """Return the unbiased standard deviation; 0 for a single element. Synchronizes with the device."""
    return float(weight.detach().double().std()) if weight.numel() > 1 else 0.0


class MagnitudePruner(Pruner):
    """Prune with a given t.

    Args:
        thresholds: by parameter name, >= 0.
    """

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self.targets = tuple(thresholds)
        self._thresholds = dict(thresholds)

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        return {name: threshold_mask(weights[name], threshold) for name, threshold in self._thresholds.items()}


class SensitivityPruner(Pruner):
    """Prune with t = s std(w), std from the first use (Han et al. 2015, section 3.1, as in their implementation).

    Later uses prune more only because weights have moved below the same t.

    Args:
        sensitivities: s by parameter name, >= 0.
    """

    def __init__(self, sensitivities: Mapping[str, float]) -> None:
        self.targets = tuple(sensitivities)
        self._sensitivities = dict(sensitivities)
        self._deviations: dict[str, float] = {}

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        masks = {}
        for name, sensitivity in self._sensitivities.items():
            if name not in self._deviations:
                self._deviations[name] = deviation(weights[name])
            masks[name] = threshold_mask(weights[name], sensitivity * self._deviations[name])
        return masks

    def state_dict(self) -> dict[str, Any]:
        return {"deviations": dict(self._deviations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._deviations = {name: float(value) for name, value in state["deviations"].items()}


class StructureThresholdPruner(Pruner):
    """Zero structures whose greatest or mean absolute value is at most a threshold.

    Rows and columns refer to torch's weight, as in the group regularizers.

    Args:
        regimes: (threshold, structure) by parameter name.
        criterion: ``Max`` or ``Mean_Abs``.
    """

    def __init__(self, regimes: Mapping[str, tuple[float, Structures]], criterion: Literal["Max", "Mean_Abs"]) -> None:
        self.targets = tuple(regimes)
        self._regimes = dict(regimes)
        self._criterion = criterion

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        masks = {}
        for name, (threshold, structures) in self._regimes.items():
            weight = weights[name]
            structures.check(name, weight.shape)
            sizes = structures.split(weight).abs()
            sizes = sizes.amax(dim=1) if self._criterion == "Max" else sizes.mean(dim=1)
            # Negated "<=" instead of ">", so that a NaN counts as large.
            masks[name] = structures.spread(~(sizes <= threshold), weight)
        return masks


# --- Pruning of recurrent networks with a threshold that rises along two straight lines (Narang et al. 2017, sec. 3)
# Symbols: S, E, f starting epoch, ending epoch and frequency of the policy; R the ramp's epoch; q the 90th percentile
# of |w| of a trained dense network; theta and phi the slopes of the first and the second line; t the threshold.


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


# --- Dynamic network surgery: connections are pruned and restored (Guo et al. 2016) -----------------------------------
# Symbols: w a weight, m its mask; mean and std of |w| at the first use; s sensitivity; a <= b the thresholds (a_k, b_k
# in the paper); e epoch, S the first active one.


class SplicingPruner(Pruner):
    """Set m to 0 where |w| < a and to 1 where |w| >= b; between them m does not change (eq. 3).

    a and b are (mean + s std), each times a factor. Needs the unmasked weights; otherwise nothing is restored.

    Args:
        sensitivities: s by parameter name, >= 0.
        low: a over (mean + s std), > 0.
        high: b over the same, >= low.
        growth: s is multiplied by 1 + (e - S) times this, >= 0.
    """

    def __init__(self, sensitivities: Mapping[str, float], *, low: float, high: float, growth: float) -> None:
        self.targets = tuple(sensitivities)
        self._sensitivities = dict(sensitivities)
        self._low, self._high, self._growth = low, high, growth
        self._statistics: dict[str, tuple[float, float]] = {}

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        grown = 1 + (moment.epoch - moment.timing.starting_epoch) * self._growth
        masks = {}
        for name, sensitivity in self._sensitivities.items():
            sizes = weights[name].detach().abs()
            if name not in self._statistics:
                self._statistics[name] = (float(sizes.double().mean()), deviation(sizes))
            mean, std = self._statistics[name]
            middle = mean + sensitivity * grown * std
            before = current[name] if name in current else torch.ones_like(sizes)
            cut = torch.where(sizes < self._low * middle, 0.0, before)
            # Negated "<" instead of ">=", so that a NaN counts as large.
            masks[name] = torch.where(~(sizes < self._high * middle), 1.0, cut).to(sizes.dtype)
        return masks

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": {name: list(pair) for name, pair in self._statistics.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics = {name: (float(mean), float(std)) for name, (mean, std) in state["statistics"].items()}
