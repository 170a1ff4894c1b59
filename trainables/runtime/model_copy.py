"""Copies of models in the middle of a training."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _WithoutHistory(TorchFunctionMode):
    """Copies tensors that autograd computed, which `copy.deepcopy` refuses, without their history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copy_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model, which may keep activations of its latest pass anywhere; ``memo`` as of `deepcopy`."""
    with _WithoutHistory():
        return copy.deepcopy(model, memo)
