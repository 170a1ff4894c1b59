"""Structures of a weight: groups of elements that are pruned, or pushed towards zero, together.

Imports torch only if a tensor is given, so that schedules can be checked without it.

Shapes: O filters or output features, I channels or input features, H and W kernel height and width. A convolution's
weight is (O, I, W) or (O, I, H, W), a matrix (O, I); G structures of n elements each:

    in a schedule    kind       one structure   G           dimensions of the weight
    2D               kernels    w[o, i]         O I         3 or 4
    3D, Filters      filters    w[o]            O           3 or 4
    Channels         channels   w[:, i]         I           3 or 4
    4D               whole      w               1           3 or 4
    Rows             rows       w[o]            O           2
    Cols             columns    w[:, i]         I           2
    Blocks           blocks     r by d of w     O/r I/d HW  4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from trainables.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = Literal["filters", "channels", "rows", "columns", "kernels", "whole", "blocks"]
#: Names of structures in schedules. Rows and columns refer to torch's weight.
GroupType = Literal["2D", "3D", "4D", "Filters", "Channels", "Rows", "Cols", "Blocks"]

KINDS: dict[str, Kind] = {
    "2D": "kernels", "3D": "filters", "4D": "whole", "Filters": "filters", "Channels": "channels", "Rows": "rows",
    "Cols": "columns", "Blocks": "blocks",
}  # fmt: skip
#: Dimensions of the weight that index the structures; a structure extends over all other dimensions.
_INDEXED_BY: dict[Kind, tuple[int, ...]] = {
    "kernels": (0, 1), "filters": (0,), "channels": (1,), "whole": (), "rows": (0,), "columns": (1,),
}  # fmt: skip
#: Allowed numbers of dimensions of the weight.
_DIMENSIONS: dict[Kind, tuple[int, ...]] = {
    **dict.fromkeys(("kernels", "filters", "channels", "whole"), (3, 4)),
    **dict.fromkeys(("rows", "columns"), (2,)),
    "blocks": (4,),
}
_WEIGHTS = {
    (3, 4): "a convolution's weight, 3 or 4 dimensions",
    (2,): "a matrix, 2 dimensions",
    (4,): "a 2D convolution's weight, 4 dimensions",
}


def parts_of(group: str) -> list[str]:
    """Return the structures that a schedule's group names: one, or two joined by ``+``."""
    return group.split("+")


def ranked_group(group: GroupType) -> GroupType:
    """Return the structure of torch's weight that corresponds to a ranking pruner's ``group_type``.

    "Rows" of published schedules are rows of the transposed weight, by which a linear layer multiplies.
    """
    return "Cols" if group == "Rows" else group


def lacking_weight(group: str, shape: Sequence[int]) -> str:
    """Return a description of the weight that a group needs if this shape does not have its structures, else "".

    >>> lacking_weight("Rows", (8, 3, 3, 3))
    'a matrix, 2 dimensions'
    """
    needed = (_DIMENSIONS[KINDS[part]] for part in parts_of(group))
    return next((_WEIGHTS[counts] for counts in needed if len(shape) not in counts), "")


def group_count(shape: Sequence[int], group: str) -> int:
    """Return G of a weight of this shape, for one group of a schedule that is not Blocks."""
    return prod(shape[dim] for dim in _INDEXED_BY[KINDS[group]])


def group_norms(weight: Tensor, group: str) -> Tensor:
    """Return the L2 norm of each group, (G,), at least float32; the gradient at a group of zeros is 0."""
    from torch.linalg import vector_norm

    return vector_norm(weight, dim=_extent(weight, group), dtype=at_least_single(weight.dtype)).flatten()


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over a weight, at least float32: half precision overflows at 65,504."""
    import torch

    return torch.promote_types(dtype, torch.float32)


def group_mask(weight: Tensor, group: str, threshold: float, criterion: str) -> Tensor:
    """Return 1 where an element's group is above the threshold, else 0; shape, dtype and device of the weight.

    The criterion ``Max`` is the group's greatest absolute value, ``Mean_Abs`` the mean of its absolute values. With two
    kinds of groups, joined by ``+``, both must be above it.
    """
    absolute = weight.detach().abs()
    kept = absolute.new_ones(absolute.shape).bool()
    for part in parts_of(group):
        extent = _extent(weight, part)
        size = absolute.amax(extent, keepdim=True) if criterion == "Max" else absolute.mean(extent, keepdim=True)
        kept = kept & (size > threshold)
    return kept.to(weight.dtype)


def _extent(weight: Tensor, group: str) -> tuple[int, ...]:
    """Return the dimensions over which a group extends."""
    return tuple(dim for dim in range(weight.dim()) if dim not in _INDEXED_BY[KINDS[group]])


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


@dataclass(frozen=True, kw_only=True)
class Structures:
    """Split weights into structures, and expand one value per structure to a weight's shape."""

    kind: Kind
    block: tuple[int, int] = (1, 1)
    """For blocks: r consecutive filters by d consecutive channels at one kernel position; G = O/r I/d H W, ordered by
    filter group, then channel group, then position."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise UserError unless a weight of this shape has these structures, and a block divides its size."""
        if len(shape) not in _DIMENSIONS[self.kind]:
            raise UserError(
                f"{self.kind} need a weight with {_listed(_DIMENSIONS[self.kind])} dimensions, got {name} of shape "
                f"{tuple(shape)}; choose another group_type or leave the weight out"
            )
        if self.kind == "blocks" and (shape[0] % self.block[0] or shape[1] % self.block[1]):
            raise UserError(
                f"block_shape must divide filters and channels of {name}, got {[*self.block, 1, 1]} for shape "
                f"{tuple(shape)}"
            )

    def count(self, shape: torch.Size) -> int:
        """Return G."""
        if self.kind == "blocks":
            return shape.numel() // (self.block[0] * self.block[1])
        return prod(shape[dim] for dim in _INDEXED_BY[self.kind])

    def split(self, weight: Tensor) -> Tensor:
        """Return the weight's structures, shape (G, n); half precision is converted to float32."""
        weight = weight.float() if weight.dtype.is_floating_point and weight.dtype.itemsize < 4 else weight
        if self.kind == "blocks":
            r, d = self.block
            grouped = weight.reshape(weight.shape[0] // r, r, weight.shape[1] // d, d, -1)
            return grouped.permute(0, 2, 4, 1, 3).reshape(-1, r * d)
        indexed = _INDEXED_BY[self.kind]
        return weight.movedim(indexed, tuple(range(len(indexed)))).reshape(self.count(weight.shape), -1)

    def spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return a mask of a weight's shape, type and device from one value per structure, shape (G,)."""
        values, shape = values.to(weight), weight.shape
        if self.kind == "blocks":
            r, d = self.block
            grouped = values.reshape(shape[0] // r, 1, shape[1] // d, 1, -1)
            return grouped.expand(-1, r, -1, d, -1).reshape(shape).contiguous()
        indexed = _INDEXED_BY[self.kind]
        sizes = [size if dim in indexed else 1 for dim, size in enumerate(shape)]
        return values.reshape(sizes).expand(shape).contiguous()


def structures_of(group_type: str, block_shape: tuple[int, int, int, int] | None = None) -> Structures:
    """Return the structures of torch's weight for a schedule's ``group_type``."""
    return Structures(kind=KINDS[group_type], block=(1, 1) if block_shape is None else block_shape[:2])
