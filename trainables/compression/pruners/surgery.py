"""Dynamic network surgery: connections are pruned and restored (Guo et al. 2016).

Symbols: w a weight, m its mask; mean and std of |w| at the first use; s sensitivity; a <= b the thresholds (a_k, b_k
in the paper); e epoch, S the first active one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.pruners.thresholds import deviation
from trainables.compression.schedule.timing import Moment


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
