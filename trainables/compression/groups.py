"""A weight seen as groups of elements that are kept or given up together. Pure functions of tensors.

Shapes: O output and I input channels, H and W kernel height and width. A convolution's weight is (O, I, W) or
(O, I, H, W), a matrix (O, I). G is the number of groups of a kind:

    kind           one group        G      dimensions that the weight needs
    2D             w[o, i]          O I    4
    3D, Filters    w[o]             O      3 or 4
    Channels       w[:, i]          I      3 or 4
    4D             w                1      3 or 4
    Rows           w[o]             O      2
    Cols           w[:, i]          I      2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainables.errors import UserError

#: The dimensions whose indices tell a kind's groups apart; over all others a group extends.
_INDEXED_BY: dict[str, tuple[int, ...]] = {
    "2D": (0, 1), "3D": (0,), "Filters": (0,), "Channels": (1,), "4D": (), "Rows": (0,), "Cols": (1,),
}  # fmt: skip

_NEEDED: dict[str, tuple[int, ...]] = {
    "2D": (4,), "3D": (3, 4), "Filters": (3, 4), "Channels": (3, 4), "4D": (3, 4), "Rows": (2,), "Cols": (2,),
}  # fmt: skip


def parts_of(group: str) -> tuple[str, ...]:
    """The kinds that a schedule's group names: one, or two joined by ``+``.

    >>> parts_of("Rows+Cols")
    ('Rows', 'Cols')
    """
    return tuple(group.split("+"))


def check_groups(name: str, shape: Sequence[int], group: str) -> None:
    """Whether a parameter has such groups.

    Raises:
        UserError: it has another number of dimensions.
    """
    for kind in parts_of(group):
        if len(shape) not in _NEEDED[kind]:
            needed = " or ".join(str(count) for count in _NEEDED[kind])
            raise UserError(f"group {kind} needs a weight of {needed} dimensions, but {name} has shape {list(shape)}")


def group_count(shape: Sequence[int], kind: str) -> int:
    """G of a weight of this shape."""
    count = 1
    for dim in _INDEXED_BY[kind]:
        count *= shape[dim]
    return count


def group_norms(weight: Tensor, kind: str) -> Tensor:
    """The L2 norm of each group, (G,), at least float32.

    The gradient at a group of zeros is 0, one of the norm's subgradients there.
    """
    dtype = at_least_single(weight.dtype)
    return torch.linalg.vector_norm(weight, dim=_extent(weight, kind), dtype=dtype).flatten()


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """What sums over a weight are taken in: half precision overflows at 65,504."""
    return torch.promote_types(dtype, torch.float32)


def group_mask(weight: Tensor, group: str, threshold: float, criterion: str) -> Tensor:
    """1 where an element's group is above the threshold, else 0; shape, dtype and device of the weight.

    Of two kinds of groups both must be above.

    Args:
        weight: of `check_groups`' shapes.
        group: one kind, or two joined by ``+``.
        threshold: >= 0.
        criterion: ``Max``, the group's greatest absolute value, or ``Mean_Abs``, the mean of its absolute values.
    """
    absolute = weight.detach().abs()
    kept = torch.ones_like(absolute, dtype=torch.bool)
    for kind in parts_of(group):
        extent = _extent(weight, kind)
        size = absolute.amax(extent, keepdim=True) if criterion == "Max" else absolute.mean(extent, keepdim=True)
        kept = kept & (size > threshold)
    return kept.to(weight.dtype)


def _extent(weight: Tensor, kind: str) -> tuple[int, ...]:
    """The dimensions over which a group extends."""
    return tuple(dim for dim in range(weight.dim()) if dim not in _INDEXED_BY[kind])
