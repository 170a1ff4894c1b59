"""Pruning of elements that are not above a threshold.

Symbols: w a weight, s sensitivity, t threshold; a mask keeps |w| > t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.schedule.timing import Moment


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
