"""Pruning of elements or structures that are not above a threshold.

Symbols: w a weight, s sensitivity, t threshold; a mask keeps |w| > t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.pruners.pruner import Pruner
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.structures import check_group, group_mask
from trainables.errors import UserError


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Return ones where |w| > t, else zeros, of the weight's shape, type and device; a NaN counts as large."""
    return (~(weight.detach().abs() <= threshold)).to(weight.dtype)


def deviation(weight: Tensor) -> float:
    """Return the unbiased standard deviation; 0 for a single element. Synchronizes with the device."""
    return float(weight.detach().double().std()) if weight.numel() > 1 else 0.0


class MagnitudePruner(Pruner):
    """Prune with a given t."""

    argument = "thresholds"

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        return {name: threshold_mask(weights[name], threshold) for name, threshold in self.values.items()}


class SensitivityPruner(Pruner):
    """Prune with t = s std(w), std from the first use (Han et al. 2015, section 3.1, as in their implementation).

    Later uses prune more only because weights have moved below the same t.
    """

    argument = "sensitivities"

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__(settings, model, generator)
        self._deviations: dict[str, float] = {}

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        masks = {}
        for name, sensitivity in self.values.items():
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
    """

    argument = "reg_regims"

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        masks = {}
        for name, (threshold, group) in self.values.items():
            check_group(group, name, weights[name].shape)
            masks[name] = group_mask(weights[name], group, threshold, self.settings.threshold_criteria)
        return masks


def ramp_threshold(epoch: int, timing: Timing, *, q: float, ramp_epoch: int, slope_factor: float) -> float:
    """Return t, which rises along two straight lines (Narang et al. 2017, section 3), in an active epoch e.

    t = theta (e - S + 1) / f before epoch R, theta (R - S + 1) / f + phi (e - R + 1) / f from R on, with theta = 2 q f
    / (2 (R - S) + 3 (E - R)) (their eq. 1) and phi = slope_factor theta; q > 0 is the 90th percentile of |w| of a
    trained dense network; S, E and f are the policy's starting epoch, ending epoch and frequency. UserError: R is so
    far outside of the policy's epochs that theta is not a positive number. In a strict schedule R is inside; a
    published one starts its policy after R, so that the second line applies from the start.
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
    """Zero elements whose absolute value is at most `ramp_threshold`."""

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        s, timing = self.settings, moment.timing
        ramp_epoch = s.ramp_from(timing.starting_epoch)
        threshold = ramp_threshold(moment.epoch, timing, q=s.q, ramp_epoch=ramp_epoch, slope_factor=s.ramp_slope_mult)
        return {name: threshold_mask(weights[name], threshold) for name in self.targets}


class SplicingPruner(Pruner):
    """Prune and restore connections: dynamic network surgery (Guo et al. 2016, eq. 3).

    m is 0 where |w| < a and 1 where |w| >= b; between them it does not change. a and b are (mean|w| + s std|w|), taken
    at the first use, each times a factor. Needs the unmasked weights; otherwise nothing is restored.
    """

    argument = "sensitivities"

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__(settings, model, generator)
        self._statistics: dict[str, tuple[float, float]] = {}

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        s = self.settings
        grown = 1 + (moment.epoch - moment.timing.starting_epoch) * s.sensitivity_multiplier
        masks = {}
        for name, sensitivity in self.values.items():
            sizes = weights[name].detach().abs()
            if name not in self._statistics:
                self._statistics[name] = (float(sizes.double().mean()), deviation(sizes))
            mean, std = self._statistics[name]
            middle = mean + sensitivity * grown * std
            before = current[name] if name in current else torch.ones_like(sizes)
            cut = torch.where(sizes < s.low_thresh_mult * middle, 0.0, before)
            # Negated "<" instead of ">=", so that a NaN counts as large.
            masks[name] = torch.where(~(sizes < s.hi_thresh_mult * middle), 1.0, cut).to(sizes.dtype)
        return masks

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": {name: list(pair) for name, pair in self._statistics.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics = {name: (float(mean), float(std)) for name, (mean, std) in state["statistics"].items()}
