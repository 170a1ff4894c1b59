"""Selection of the k smallest of n values: exact counts, ties by index, the same on every device.

Symbols: n values; s the share to prune, in [0, 1]; k how many are pruned. A NaN counts as the largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def element_count(share: float, n: int) -> int:
    """Return k = int(s n), as published results count.

    >>> element_count(0.65, 663552)
    431308
    """
    return int(share * n)


def structure_count(share: float, n: int, group_size: int = 1) -> int:
    """Return k = floor(s n), rounded down to a multiple of the group size; less than n unless s is 1.

    >>> [structure_count(0.7, 16), structure_count(0.7, 16, group_size=8), structure_count(1.0, 16)]
    [11, 8, 16]
    """
    # Rounding cannot give n for a share below 1: s n is then at most the floating-point number before n.
    return int(share * n) // group_size * group_size


def kept_after(values: Tensor, count: int) -> Tensor:
    """Return which values are kept when the k smallest are removed; among equal values the first is removed first.

    Args:
        values: shape (n,), any real type, any device.
        count: k, in [0, n].

    Returns:
        Booleans of shape (n,), exactly n - k of them true.
    """
    if count == 0:
        return torch.ones_like(values, dtype=torch.bool)
    # kthvalue does not support half precision on every device; widening keeps the order.
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    values = torch.where(values.isnan(), torch.inf, values)
    last = values.kthvalue(count).values
    kept = values > last
    ties = (values == last).nonzero().flatten()
    # At least k values are <= `last`; the ties beyond k are kept.
    surplus = values.numel() - int(kept.sum()) - count
    kept[ties[ties.numel() - surplus :]] = True
    return kept
