"""Checksummed files, written atomically.

A checksum in the first line detects what `trainables.atomic_write` cannot prevent: blocks that a crashed machine never
wrote.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from trainables.atomic_write import atomic_write

_HEADER_BYTES = 65  # 64 hexadecimal digits and a line feed


def write_checked(path: Path, payload: bytes) -> None:
    """Write a payload with its checksum, and missing folders; ``path`` keeps its previous content after an error.

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); no part of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(_header(payload))
        file.write(payload)


def read_checked(path: Path) -> bytes | None:
    """Return the payload, or None for a file that is missing, unreadable or corrupt.

    A file whose checksum does not match is removed, unless another process has replaced it meanwhile.
    """
    try:
        with path.open("rb") as file:
            data = file.read()
            payload = data[_HEADER_BYTES:]
            if data[:_HEADER_BYTES] == _header(payload):
                return payload
            remove_what_was_read(path, os.fstat(file.fileno()))
    except OSError:
        pass
    return None


def _header(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n"


def remove_what_was_read(path: Path, read: os.stat_result) -> None:
    """Remove a corrupt file, if it is still the one that was read.

    Args:
        path: path of the file.
        read: `os.fstat` of the opened file. Call this while it is open: then no other file can have its inode number.
    """
    with suppress(OSError):
        if os.path.samestat(os.stat(path), read):
            path.unlink()
