"""Arguments of a model's forward pass, batched along dimension 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Call(NamedTuple):
    """Arguments of one forward pass, by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the arguments."""
        return [leaf for leaf in pytree.tree_leaves(tuple(self)) if isinstance(leaf, Tensor)]

    @property
    def size(self) -> int:
        """Return the samples of the batch, the size of the first tensor that has dimensions; 1 without one."""
        return next((len(tensor) for tensor in self.tensors if tensor.dim()), 1)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with every tensor changed."""
        return Call(*pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tuple(self)))

    def repeated(self, samples: int) -> Call:
        """Return so many samples, the call's own again and again; tensors of another size stay."""
        size, taken = self.size, torch.arange(samples) % max(1, self.size)
        return self.changed(lambda tensor: tensor[taken] if tensor.dim() and len(tensor) == size else tensor)
