"""The structures of a weight: groups of elements that are pruned together.

Shapes: W a weight, (F, C, ...) with F filters or output features, C channels or input features, then kernel positions;
G structures of n elements each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.settings.base import GroupType
from trainables.compression.timing import Moment
from trainables.errors import UserError

Kind = Literal["filters", "channels", "rows", "columns", "kernels", "whole", "blocks"]

#: Names of structures in schedules, where they mean torch's own weight.
KINDS: dict[str, Kind] = {
    "2D": "kernels", "3D": "filters", "4D": "whole", "Filters": "filters", "Channels": "channels", "Rows": "rows",
    "Cols": "columns", "Blocks": "blocks",
}  # fmt: skip

#: Least and greatest number of dimensions of a weight that has such structures.
_DIMENSIONS: dict[Kind, tuple[int, int]] = {
    "filters": (3, 5), "channels": (2, 5), "rows": (2, 2), "columns": (2, 2), "kernels": (3, 5), "whole": (1, 5),
    "blocks": (4, 4),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Structures:
    """What the structures of a weight are."""

    kind: Kind
    """Filters W[i], channels W[:, i], rows and columns of a matrix, kernels W[i, j], the whole weight, or blocks."""
    block: tuple[int, int] = (1, 1)
    """For blocks: r consecutive filters by d consecutive channels at one kernel position; G = F/r C/d positions,
    counted filter group first, then channel group, then position."""

    def check(self, name: str, shape: torch.Size) -> None:
        """That a weight of this shape has such structures.

        Raises:
            UserError: it has other dimensions, or blocks do not divide it.
        """
        least, greatest = _DIMENSIONS[self.kind]
        if not least <= len(shape) <= greatest:
            wanted = f"{least}" if least == greatest else f"{least} to {greatest}"
            raise UserError(
                f"{self.kind} need a weight with {wanted} dimensions, got {name} of shape {tuple(shape)}; choose "
                "another group_type or leave the weight out"
            )
        if self.kind == "blocks" and (shape[0] % self.block[0] or shape[1] % self.block[1]):
            raise UserError(
                f"block_shape must divide filters and channels of {name}, got {[*self.block, 1, 1]} for shape "
                f"{tuple(shape)}"
            )

    def count(self, shape: torch.Size) -> int:
        """G."""
        if self.kind in ("filters", "rows"):
            return shape[0]
        if self.kind in ("channels", "columns"):
            return shape[1]
        if self.kind == "kernels":
            return shape[0] * shape[1]
        if self.kind == "blocks":
            return shape.numel() // (self.block[0] * self.block[1])
        return 1

    def split(self, weight: Tensor) -> Tensor:
        """The weight's structures, shape (G, n); narrow types as float32."""
        weight = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
        if self.kind in ("filters", "rows"):
            return weight.flatten(1)
        if self.kind in ("channels", "columns"):
            return weight.transpose(0, 1).flatten(1)
        if self.kind == "kernels":
            return weight.flatten(2).flatten(0, 1)
        if self.kind == "blocks":
            r, d = self.block
            grouped = weight.reshape(weight.shape[0] // r, r, weight.shape[1] // d, d, -1)
            return grouped.permute(0, 2, 4, 1, 3).reshape(-1, r * d)
        return weight.reshape(1, -1)

    def spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """A mask of a weight's shape, type and device from one value a structure, shape (G,)."""
        values, shape = values.to(weight), weight.shape
        if self.kind in ("filters", "rows"):
            spread = values.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        elif self.kind in ("channels", "columns"):
            spread = values.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
        elif self.kind == "kernels":
            spread = values.reshape(*shape[:2], *[1] * (len(shape) - 2)).expand(shape)
        elif self.kind == "blocks":
            r, d = self.block
            grouped = values.reshape(shape[0] // r, 1, shape[1] // d, 1, -1)
            spread = grouped.expand(-1, r, -1, d, -1).reshape(shape)
        else:
            spread = values.expand(shape)
        return spread.contiguous()


class StructureParameterPruner(Pruner):
    """A structure is zero where its greatest or mean absolute value is at most a threshold.

    Rows and columns are those of torch's weight, as the group regularizers count them.

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
            # Not "above": a NaN counts as large.
            masks[name] = structures.spread(~(sizes <= threshold), weight)
        return masks


def structures_of(group_type: GroupType, block_shape: tuple[int, int, int, int] | None = None) -> Structures:
    """What a schedule's ``group_type`` means on torch's own weight."""
    return Structures(kind=KINDS[group_type], block=(1, 1) if block_shape is None else block_shape[:2])
