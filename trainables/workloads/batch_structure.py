"""Batches of any shape as tuples of tensors and back: what a user's loader yields, and what the loop handles.

Shapes: a batch is a tensor, or tuples, lists and dicts of tensors; flat it is a tuple of tensors in their order, the
first dimension of each the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from trainables.errors import UserError


def flatten(batch: Any) -> tuple[Tensor, ...]:
    """The tensors of a batch, in order.

    >>> import torch
    >>> [t.item() for t in flatten({"a": torch.tensor(1), "b": [torch.tensor(2)]})]
    [1, 2]

    Raises:
        UserError: something in it is no tensor, or there is nothing.
    """
    found = tuple(_tensors(batch, "a batch"))
    if not found:
        raise UserError("a batch must hold at least one tensor, got none")
    return found


def unflatten(structure: Any, tensors: tuple[Tensor, ...]) -> Any:
    """These tensors in the places that those of another batch of the same structure had."""
    remaining = iter(tensors)
    built = _build(structure, remaining)
    if next(remaining, None) is not None:
        raise ValueError(f"{len(tensors)} tensors do not fit the batch's structure")
    return built


def structure_of(batch: Any) -> Any:
    """What `unflatten` needs of a batch: the same without its tensors."""
    return _build(batch, None)


def _tensors(batch: Any, where: str) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for name, part in batch.items():
            yield from _tensors(part, f"{where}[{name!r}]")
    elif isinstance(batch, (tuple, list)):
        for number, part in enumerate(batch):
            yield from _tensors(part, f"{where}[{number}]")
    else:
        raise UserError(
            f"batches must hold tensors in tuples, lists or dicts, got {type(batch).__name__} as {where}: leave it out "
            "in the loader's collate_fn, or make a tensor of it"
        )


def _build(structure: Any, tensors: Iterator[Tensor] | None) -> Any:
    if isinstance(structure, Mapping):
        return {name: _build(part, tensors) for name, part in structure.items()}
    if isinstance(structure, (tuple, list)):
        parts = [_build(part, tensors) for part in structure]
        if hasattr(structure, "_fields"):  # a named tuple
            return type(structure)(*parts)
        return tuple(parts) if isinstance(structure, tuple) else parts
    return None if tensors is None else next(tensors)
