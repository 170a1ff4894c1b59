"""Pruning the smallest share of the elements, fixed or growing over the epochs.

Symbols: s share of the elements that is zero, in [0, 1]; s_i, s_f its first and last value; p the policy's progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.exact import element_count, kept_after
from trainables.compression.settings.pruners import _Desired, _Gradual
from trainables.compression.timing import Moment

#: The share to prune at a moment.
Share = Callable[[Moment], float]


def gradual_share(initial: float, final: float, progress: float) -> float:
    """s = s_f + (s_i - s_f) (1 - p)^3 (Zhu & Gupta 2017, eq. 1).

    Args:
        initial: s_i.
        final: s_f.
        progress: p, 0 in the first active epoch, 1 in the last.

    >>> [round(gradual_share(0.05, 0.8, p), 4) for p in (0, 0.25, 0.5, 0.75, 1)]
    [0.05, 0.4836, 0.7063, 0.7883, 0.8]
    """
    left = (1 - progress) ** 3
    return left * initial + (1 - left) * final  # exactly both ends at the ends


def constant_share(share: float) -> Share:
    """The same share at every moment."""
    return lambda moment: share


def share_of(settings: _Desired | _Gradual) -> Share:
    """The share that settings describe: one number, or a cubic over the policy's active epochs."""
    if isinstance(settings, _Desired):
        return constant_share(settings.desired_sparsity)
    initial, final = settings.initial_sparsity, settings.final_sparsity
    return lambda moment: gradual_share(initial, final, moment.progress)


class LevelPruner(Pruner):
    """Exactly int(s n) of a weight's n elements are zero, those of the smallest absolute value.

    Args:
        shares: by parameter name.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.targets = tuple(shares)
        self._shares = dict(shares)

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        return {name: level_mask(weights[name], share(moment)) for name, share in self._shares.items()}


def level_mask(weight: Tensor, share: float) -> Tensor:
    """The mask that removes the smallest elements.

    Args:
        weight: any shape.
        share: s.

    Returns:
        Zeros and ones of the weight's shape, type and device; of equal elements the first goes first.
    """
    kept = kept_after(weight.detach().abs().flatten(), element_count(share, weight.numel()))
    return kept.to(weight.dtype).reshape(weight.shape)
