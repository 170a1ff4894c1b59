"""Structures of a weight: groups of elements that are pruned, or pushed towards zero, together.

Imports torch only if a tensor is given, so that schedules can be checked without it.

Shapes: O filters or output features, I channels or input features, H and W kernel height and width. A convolution's
weight is (O, I, W) or (O, I, H, W), a matrix (O, I); G structures of n elements each:

    group        one structure   G           dimensions of the weight
    2D           w[o, i]         O I         3 or 4
    3D, Filters  w[o]            O           3 or 4
    Channels     w[:, i]         I           3 or 4
    4D           w               1           3 or 4
    Rows         w[o]            O           2
    Cols         w[:, i]         I           2
    Blocks       r by d of w     O/r I/d HW  2 or 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from trainables.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

#: Allowed numbers of dimensions of a group's weight, and a description of it.
_WEIGHTS = {
    **dict.fromkeys(("2D", "3D", "4D", "Filters", "Channels"), ((3, 4), "a convolution's weight, 3 or 4 dimensions")),
    **dict.fromkeys(("Rows", "Cols"), ((2,), "a matrix, 2 dimensions")),
    "Blocks": ((2, 4), "a matrix or a 2D convolution's weight, 2 or 4 dimensions"),
}
#: Dimensions of the weight that index a group's structures; a structure extends over all other dimensions.
_INDEXED_BY = {"2D": (0, 1), "3D": (0,), "4D": (), "Filters": (0,), "Channels": (1,), "Rows": (0,), "Cols": (1,)}


def check_group(group: str, name: str, shape: Sequence[int]) -> None:
    """Raise UserError unless a weight of this shape has a group's structures, of one kind or of two joined by ``+``."""
    for counts, wanted in map(_WEIGHTS.__getitem__, group.split("+")):
        if len(shape) not in counts:
            raise UserError(f"{group} of {name} need {wanted}, got shape {'x'.join(map(str, shape)) or '()'}")


def group_mask(weight: Tensor, group: str, threshold: float, criterion: str) -> Tensor:
    """Return 1 where an element's group is above the threshold, else 0; shape, dtype and device of the weight.

    The criterion ``Max`` is the group's greatest absolute value, ``Mean_Abs`` the mean of its absolute values. With two
    kinds of groups, joined by ``+``, both must be above it.
    """
    mask = weight.detach().new_ones(weight.shape)
    for structures in map(Structures, group.split("+")):
        absolute = structures.split(weight.detach()).abs()
        sizes = absolute.amax(1) if criterion == "Max" else absolute.mean(1)
        mask *= structures.spread(~(sizes <= threshold), weight)  # a NaN counts as large
    return mask


@dataclass(frozen=True)
class Structures:
    """Split weights into the structures of a group, and expand one value per structure to a weight's shape."""

    group: str
    block: tuple[int, int] = (1, 1)
    """For Blocks: r consecutive filters by d consecutive channels at one kernel position; G = O/r I/d H W, ordered by
    filter group, then channel group, then position."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise UserError unless a weight of this shape has these structures, and a block divides its size."""
        check_group(self.group, name, shape)
        if self.group == "Blocks" and (shape[0] % self.block[0] or shape[1] % self.block[1]):
            raise UserError(
                f"block_shape must divide filters and channels of {name}, got {[*self.block, 1, 1]} for shape "
                f"{tuple(shape)}"
            )

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
        """Return O/r, r, I/d, d and P, for structures of r filters by d channels, and P kernel positions."""
        r, d = self.block
        if self.group != "Blocks":
            r, d = (1 if dim in _INDEXED_BY[self.group] else shape[dim] for dim in (0, 1))
        return shape[0] // r, r, shape[1] // d, d, prod(shape[2:])

    def count(self, shape: Sequence[int]) -> int:
        """Return G."""
        filters, _, channels, _, places = self._sizes(shape)
        return filters * channels * (places if self.group == "Blocks" else 1)

    def split(self, weight: Tensor) -> Tensor:
        """Return the weight's structures, shape (G, n); half precision is converted to float32."""
        weight = weight.float() if weight.dtype.is_floating_point and weight.dtype.itemsize < 4 else weight
        order = (0, 2, 4, 1, 3) if self.group == "Blocks" else (0, 2, 1, 3, 4)
        grouped = weight.reshape(self._sizes(weight.shape))
        return grouped.permute(order).reshape(self.count(weight.shape), -1)

    def norms(self, weight: Tensor, order: int = 2) -> Tensor:
        """Return each structure's L1 or L2 norm, (G,), at least float32; the gradient at a structure of zeros is 0."""
        from torch.linalg import vector_norm

        return vector_norm(self.split(weight), order, dim=1)

    def spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return a mask of a weight's shape, type and device from one value per structure, shape (G,)."""
        sizes = self._sizes(weight.shape)
        grouped = values.to(weight).reshape(sizes[0], 1, sizes[2], 1, -1)
        return grouped.expand(sizes).reshape(weight.shape).contiguous()


def ranked_structures(settings: Any) -> Structures:
    """Return the structures of torch's weight that a ranking pruner's settings name.

    "Rows" of published schedules are rows of the transposed weight, by which a linear layer multiplies.
    """
    block = settings.kwargs.block_shape[:2] if settings.group_type == "Blocks" else (1, 1)
    return Structures("Cols" if settings.group_type == "Rows" else settings.group_type, block)
