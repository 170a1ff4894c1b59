"""Conversion of batches between any structure, as a user's loader yields, and tuples of tensors, as the loop uses.

Shapes: a batch is a tensor, or tuples, lists and dicts of tensors; flattened it is a tuple of tensors in their order.
The first dimension of each tensor indexes the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from trainables.errors import UserError


def flatten(batch: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a batch, in order.

    >>> import torch
    >>> [t.item() for t in flatten({"a": torch.tensor(1), "b": [torch.tensor(2)]})]
    [1, 2]

    Raises:
        UserError: it contains something that is no tensor, or no tensor at all.
    """
    found = tuple(_tensors(batch, "a batch"))
    if not found:
        raise UserError("a batch must hold at least one tensor, got none")
    return found


def unflatten(structure: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Put tensors into the places of the tensors of another batch with this structure."""
    remaining = iter(tensors)
    built = _build(structure, remaining)
    if next(remaining, None) is not None:
        raise ValueError(f"{len(tensors)} tensors do not fit the batch's structure")
    return built


def structure_of(batch: Any) -> Any:
    """Return a batch without its tensors, as needed by `unflatten`."""
    return _build(batch, None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's arguments or result, nested tuples, lists, mappings and dataclasses."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield whatever is no tuple, list, mapping or dataclass in a module's arguments or result, and keys as a tuple."""
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        yield tuple(value)
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in fields(value))
    else:
        yield value
        return
    for part in parts:
        yield from leaves_in(part)


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
