"""Rows of tensors by sample number, in a memory-mapped file of limited size.

Shapes: S samples, B rows of a call. A row has any shape and dtype, the same for all rows of a file.

The file has no name once it is open, so the system frees it when it is closed or collected or when the process dies.
No later run can find it, so partially written content is never read.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor


class RowFile:
    """File of at most ``budget_bytes`` of rows; the first rows put are kept.

    Besides the file, 16 bytes per sample are kept in memory: the position of its row, and the checksum of the input
    from which the row was computed.

    Args:
        samples: S; sample numbers are 0..S-1.
        budget_bytes: maximum size of the file in bytes.
        folder: folder of the file; None: the system's folder for temporary files.
    """

    def __init__(self, *, samples: int, budget_bytes: int, folder: str | Path | None = None) -> None:
        self._samples = samples
        self._budget_bytes = budget_bytes
        self._folder = folder
        self._slots = torch.full((samples,), -1, dtype=torch.int64)  # (S,) row of the file, -1: none
        self._checksums = torch.zeros(samples, dtype=torch.int64)  # (S,)
        self._filled = 0
        self._file: IO[bytes] | None = None
        self._rows: Tensor | None = None  # (capacity, *row), mapped
        self.capacity: int | None = None
        """Number of rows that fit; None until the first row gives the row size."""

    @property
    def bytes(self) -> int:
        """Return the size of the file on disk in bytes."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    @property
    def room(self) -> int:
        """Return the number of rows that can still be put; before the first row, the number of samples."""
        return (self._samples if self.capacity is None else self.capacity) - self._filled

    def held(self, indices: Tensor) -> Tensor:
        """Return which of these samples have a row: (B,) bool."""
        return self._slots[indices] >= 0

    def get(self, indices: Tensor) -> Tensor:
        """Return a copy on the CPU of these samples' rows, (B, *row); each sample must have one."""
        assert self._rows is not None
        return self._rows.index_select(0, self._slots[indices])

    def checksums(self, indices: Tensor) -> Tensor:
        """Return the checksums put with the rows: (B,) int64."""
        return self._checksums[indices]

    def put(self, indices: Tensor, rows: Tensor, checksums: Tensor) -> None:
        """Store the rows of samples that have none, as many as fit.

        Raises:
            OSError: the folder cannot hold the file.
        """
        if self.capacity is None:
            self._open(rows)
        # A sampler that draws with replacement may give a sample twice; its first row is kept.
        first = np.sort(np.unique(indices.numpy(), return_index=True)[1])[: self.room]
        if self._rows is None or len(first) == 0:
            return
        chosen = torch.from_numpy(first)
        slots = torch.arange(self._filled, self._filled + len(first))
        self._rows[slots] = rows.detach()[chosen.to(rows.device)].cpu()
        self._checksums[indices[chosen]] = checksums.cpu()[chosen]
        self._slots[indices[chosen]] = slots  # last, so that a row counts as held only once it is complete
        self._filled += len(first)

    def forget(self) -> None:
        """Drop all rows; the file's space is reused."""
        self._slots.fill_(-1)
        self._filled = 0

    def close(self) -> None:
        """Drop all rows and free the disk space."""
        self.forget()
        self._rows, self.capacity = None, None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, rows: Tensor) -> None:
        row_bytes = rows[0].numel() * rows.element_size()
        self.capacity = min(self._samples, self._budget_bytes // row_bytes)
        if self.capacity == 0:
            return
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by close()
        size = self.capacity * row_bytes
        if hasattr(os, "posix_fallocate"):
            # A full disk is an error here rather than a signal that kills the process at a later write.
            os.posix_fallocate(self._file.fileno(), 0, size)
        else:
            self._file.truncate(size)
        mapped = torch.from_numpy(np.memmap(self._file, dtype=np.uint8, mode="r+", shape=(size,)))
        self._rows = mapped.view(rows.dtype).view(self.capacity, *rows.shape[1:])


def row_checksums(rows: Tensor) -> Tensor:
    """Compute a checksum of each row's bits: (B, ...) of any dtype to (B,) int64, on the same device.

    The bits are read as integers and multiplied by fixed pseudo-random odd numbers, modulo 2^64. Integer sums do
    not depend on their order, so equal rows have equal checksums in every batch and on every device, and one changed
    element always changes it.
    """
    size = min(rows.element_size(), 8)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = rows.detach().reshape(len(rows), -1).contiguous().view(kind)
    factors = _factors(bits.shape[1], rows.device)
    at_once = max(1, 2**22 // max(1, bits.shape[1]))  # 32 MB of int64, for any batch size
    return torch.cat([(part.to(torch.int64) * factors).sum(1) for part in bits.split(at_once)])


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)
