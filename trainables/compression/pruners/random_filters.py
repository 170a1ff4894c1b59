"""Random removal of filters: an exact share, or each filter with a probability.

Symbols: G filters; s share or probability of removal; a map is G numbers, 0 removes a filter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainables.compression.pruners.ranked import DrawingPruner
from trainables.compression.pruners.topk import structure_count


class RandomPruner(DrawingPruner):
    """Remove exactly floor(s G) filters, drawn again at each use."""

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = torch.ones(count, dtype=torch.bool)
        kept[torch.randperm(count, generator=self._generator)[: structure_count(share, count)]] = False
        return kept


class BernoulliPruner(DrawingPruner):
    """Remove each filter with probability s; the kept filters are multiplied by G over their number.

    If all would be removed, the one with the largest L2 norm is kept.
    """

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = (torch.rand(count, generator=self._generator, dtype=torch.float64) >= share).double()
        if not kept.any():
            norms = torch.linalg.vector_norm(self.structures.split(weight), dim=1)
            kept[norms.argmax().cpu()] = 1
        return kept * (count / kept.sum())
