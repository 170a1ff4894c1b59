"""Which k of n values go: exact counts, ties by index, the same on every device.

Symbols: n values; s the share to prune, in [0, 1]; k how many are pruned. A NaN counts as the largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def element_count(share: float, n: int) -> int:
    """k = int(s n), as published results count.

    >>> element_count(0.65, 663552)
    431308
    """
    return int(share * n)


def structure_count(share: float, n: int, group_size: int = 1) -> int:
    """k = floor(s n), rounded down to a multiple of the group size; never all n of them unless s is 1.

    >>> [structure_count(0.7, 16), structure_count(0.7, 16, group_size=8), structure_count(1.0, 16)]
    [11, 8, 16]
    """
    # Rounding cannot make all of a share below 1: s n is then at most the number before n.
    return int(share * n) // group_size * group_size


def kept_after(values: Tensor, count: int) -> Tensor:
    """What stays when the smallest values go; of equal ones the first goes first.

    Args:
        values: shape (n,), any real type; on whatever device.
        count: k, in [0, n].

    Returns:
        Truth values of shape (n,), exactly n - k of them true.
    """
    if count == 0:
        return torch.ones_like(values, dtype=torch.bool)
    # Narrow types have no selection on every device; widening them keeps their order.
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    values = torch.where(values.isnan(), torch.inf, values)
    last = values.kthvalue(count).values
    kept = values > last
    ties = (values == last).nonzero().flatten()
    # k values are at most `last`; those of its ties that do not fit into k stay.
    surplus = values.numel() - int(kept.sum()) - count
    kept[ties[ties.numel() - surplus :]] = True
    return kept
