"""Rows of a forward cache: their file, and the keys by which a batch's inputs find them.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainables.workloads.batch_structure import leaves_in


class RowFile:
    """File without a name of rows of one shape, by key; it grows with them, to ``most_bytes``.

    ``like`` (B, *row) has rows of the shape and dtype of those to come; a folder of None is the system's for temporary
    files. OSError, here or at `put`: the folder cannot hold the file.
    """

    def __init__(self, like: Tensor, *, most_bytes: int, folder: str | Path | None = None) -> None:
        self.row_bytes = like[0].numel() * like.element_size()
        self.hit_batches = 0  # batches of which at least one row was here
        self._places: dict[int, int] = {}
        capacity = most_bytes // self.row_bytes
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by close()
        self._file.truncate(capacity * self.row_bytes)  # without room on the disk so far
        with torch.inference_mode(False):  # it is written into outside of that mode, too
            mapped = torch.from_numpy(np.memmap(self._file, dtype=np.uint8, mode="r+"))
            self._rows = mapped.view(like.dtype).view(capacity, *like.shape[1:])

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: int) -> bool:
        return key in self._places

    @property
    def bytes(self) -> int:
        return len(self) * self.row_bytes

    def get(self, keys: Sequence[int]) -> Tensor:
        """Return a copy of these rows, (B, *row), on the CPU."""
        return self._rows.index_select(0, torch.tensor([self._places[key] for key in keys], dtype=torch.int64))

    @torch.no_grad()  # here as below, so that a count of FLOPs sees that nothing is detached in the model
    def put(self, rows: Mapping[int, int], y: Tensor) -> None:
        """Append rows of y (B, *row): those of the numbers that ``rows`` has for keys that are not here."""
        begin, end = len(self), len(self) + len(rows)
        if hasattr(os, "posix_fallocate"):
            # A full disk is an error here rather than a signal that kills the process at the write.
            os.posix_fallocate(self._file.fileno(), begin * self.row_bytes, len(rows) * self.row_bytes)
        self._rows[begin:end] = y[torch.tensor([*rows.values()], device=y.device)].cpu()
        self._places.update(zip(rows, range(begin, end), strict=True))

    def close(self) -> None:
        """Drop all rows and free the disk space."""
        del self._rows
        self._places.clear()
        self._file.close()


@torch.no_grad()
def row_checksums(rows: Tensor) -> Tensor:
    """Compute a checksum of each row's bits: (B, ...) of any dtype to (B,) int64, on the same device.

    The bits are read as integers and multiplied by fixed pseudo-random odd numbers, modulo 2^64. Integer sums do
    not depend on their order, so equal rows have equal checksums in every batch and on every device, and one changed
    element always changes it. Two of a million different rows have one checksum with a probability below 10^-5.
    """
    kind = {1: torch.uint8, 2: torch.int16}.get(rows.element_size(), torch.int32)
    bits = rows.reshape(len(rows), -1).contiguous().view(kind)
    factors = _factors(bits.shape[1], rows.device)
    at_once = max(1, 2**22 // max(1, bits.shape[1]))  # 32 MB of int64, for any batch size
    sums = []
    for part in bits.split(at_once):
        if kind is torch.int32:
            part = part ^ (part >> 16)  # floats of few digits differ in their first bits alone, which products lose
        sums.append((part.to(torch.int64) * factors).sum(1))
    return torch.cat(sums)


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)


class Kind(NamedTuple):
    """Properties in common to batches whose outputs are rows of one shape."""

    is_training: bool
    inputs: tuple[Any, ...]
    """Shapes without the rows, dtypes, and what is no tensor."""
    device: torch.device
    autocast: str


#: Arguments beside tensors that are compared by their value.
PLAIN = (type(None), bool, int, float, str, tuple, torch.dtype, torch.device)


def read_inputs(is_training: bool, arguments: Any) -> tuple[Kind, list[int]] | None:
    """Return the kind of a forward pass's arguments and a key for each row; None where that is not possible."""
    leaves = [*leaves_in(arguments)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = next((len(t) for t in tensors if t.dim()), 0)
    if rows == 0 or not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return None  # an object may hold tensors that nobody sees here, such as a cache of keys and values
    if any(t.layout != torch.strided or t.is_nested or t.requires_grad for t in tensors):
        return None
    sums = torch.zeros((), dtype=torch.int64)
    for place, tensor in enumerate(tensors):
        whole = tensor.dim() == 0 or len(tensor) != rows
        sums = sums + (2 * place + 1) * row_checksums(tensor[None] if whole else tensor).cpu()
    device = next(t.device for t in tensors if t.dim())
    kind = Kind(
        is_training=is_training,
        inputs=tuple(
            (leaf.dtype, *(leaf.shape[1:] if leaf.dim() and len(leaf) == rows else (leaf.shape,)))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ),
        device=device,
        autocast=str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "off",
    )
    return kind, sums.tolist()
