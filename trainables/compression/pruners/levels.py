"""Pruning of a share of the elements with the smallest values, fixed or growing over the epochs.

Symbols: s share of the elements that is zero, in [0, 1]; s_i, s_f its first and last value; p the policy's progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.pruners.topk import element_count, kept_after
from trainables.compression.schedule.pruner_configs import _DesiredConfig, _GradualConfig
from trainables.compression.schedule.timing import Moment, gradual_share

#: The share to prune at a moment.
Share = Callable[[Moment], float]


def constant_share(share: float) -> Share:
    """Return a share that is the same at every moment."""
    return lambda moment: share


def share_of(settings: _DesiredConfig | _GradualConfig) -> Share:
    """Return the share that settings describe: constant, or a cubic over the policy's active epochs."""
    if isinstance(settings, _DesiredConfig):
        return constant_share(settings.desired_sparsity)
    initial, final = settings.initial_sparsity, settings.final_sparsity
    return lambda moment: gradual_share(initial, final, moment.progress)


class LevelPruner(Pruner):
    """Zero exactly int(s n) of a weight's n elements, those with the smallest absolute values.

    Args:
        shares: by parameter name.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.targets = tuple(shares)
        self._shares = dict(shares)

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        return {name: level_mask(weights[name], share(moment)) for name, share in self._shares.items()}


def level_mask(weight: Tensor, share: float) -> Tensor:
    """Return the mask that removes the elements with the smallest absolute values.

    Args:
        weight: any shape.
        share: s.

    Returns:
        Zeros and ones of the weight's shape, type and device; among equal elements the first is removed first.
    """
    kept = kept_after(weight.detach().abs().flatten(), element_count(share, weight.numel()))
    return kept.to(weight.dtype).reshape(weight.shape)
