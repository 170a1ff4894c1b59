"""Pruning of structures that are not above a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.schedule.timing import Moment
from trainables.compression.structures import Structures


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
