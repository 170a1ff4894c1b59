"""Free space of a disk that checkpoints, which can be lost, leave to the journal and the results of a search."""

from __future__ import annotations

import shutil
from pathlib import Path

#: Bytes that stay free, or this share of a disk for which they are much. The journal of 10,000 trials has some 30 MB.
_RESERVE_BYTES, _RESERVE_SHARE = 256 * 2**20, 0.1


def lacking_bytes(folder: Path, size_bytes: int) -> int:
    """Return how many bytes of the reserve would be taken by writing this many; 0 if it stays whole.

    Args:
        folder: where they are written; it need not exist.
        size_bytes: bytes to be written.

    Raises:
        OSError: the disk cannot be asked.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    reserve = min(_RESERVE_BYTES, int(_RESERVE_SHARE * disk.total))
    return max(reserve + size_bytes - disk.free, 0)
