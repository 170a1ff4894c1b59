"""Pruning of elements or structures that are not above a threshold.

Symbols: w a weight, s sensitivity, t threshold; a mask keeps |w| > t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.schedule.timing import Moment
from trainables.compression.structures import Structures


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
