"""Joins many small tensors into one for saving.

A run's state has a hundred small tensors, and `torch.save` needs more time for each tensor than for its content.
The result has only plain types and tensors, which ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

#: Larger tensors are written unchanged: their bytes take most of the time, and a copy would take memory.
_SMALL_BYTES = 1 << 16
#: First element of a tuple that replaces a tensor; the others are its group and its index in the group.
_MARK = "packed tensor"


def pack(state: Any) -> dict[str, Any]:
    """Return a state of dictionaries, lists, tuples and tensors with its small tensors joined into one per dtype.

    The state is not changed. The result shares memory with it only in tensors that were not joined.
    """
    groups: dict[torch.dtype, tuple[int, list[Tensor]]] = {}

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _through(value, replaced)
        if not _can_join(value):
            return value
        number, tensors = groups.setdefault(value.dtype, (len(groups), []))
        tensors.append(value)
        return (_MARK, number, len(tensors) - 1)

    with torch.no_grad():
        rest = replaced(state)
        joined = [torch.cat([tensor.view(-1) for tensor in tensors]) for _, tensors in groups.values()]
    shapes = [[n for tensor in tensors for n in (tensor.dim(), *tensor.shape)] for _, tensors in groups.values()]
    return {"rest": rest, "joined": joined, "shapes": [torch.tensor(each, dtype=torch.int64) for each in shapes]}


def unpack(packed: dict[str, Any]) -> Any:
    """Return the state that was given to `pack`; each joined tensor gets memory of its own."""
    groups = []
    for joined, numbers in zip(packed["joined"], packed["shapes"], strict=True):
        shapes = _shapes(numbers.tolist())
        parts = joined.split([prod(shape) for shape in shapes])
        groups.append([part.clone().view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def restored(value: Any) -> Any:
        if type(value) is tuple and len(value) == 3 and value[0] == _MARK:
            return groups[value[1]][value[2]]
        return _through(value, restored)

    return restored(packed["rest"])


def _shapes(numbers: list[int]) -> list[list[int]]:
    """Split numbers into shapes, each stored after its number of dimensions."""
    found, place = [], 0
    while place < len(numbers):
        end = place + 1 + numbers[place]
        found.append(numbers[place + 1 : end])
        place = end
    return found


def _through(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with every element changed, or any other value itself."""
    kind = type(value)
    if kind is dict:
        return {name: change(inner) for name, inner in value.items()}
    if kind is list or kind is tuple:
        return kind(change(inner) for inner in value)
    if kind is OrderedDict:
        found = OrderedDict((name, change(inner)) for name, inner in value.items())
        found.__dict__.update(value.__dict__)  # a module's state keeps version numbers there
        return found
    return value


def _can_join(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() * tensor.element_size() <= _SMALL_BYTES
    )
