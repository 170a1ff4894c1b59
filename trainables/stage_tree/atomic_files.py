"""Checksummed files, written atomically.

A checksum in the first line detects what `trainables.atomic_write` cannot prevent: blocks that a crashed machine never
wrote.
"""

from __future__ import annotations

import hashlib

from trainables.storage import Files

_HEADER_BYTES = 65  # 64 hexadecimal digits and a line feed


def write_checked(files: Files, name: str, payload: bytes) -> None:
    """Write a payload with its checksum, and missing folders; the file keeps its previous content after an error.

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); no part of it is left.
    """
    files.write(name, (_header(payload), payload))


def read_checked(files: Files, name: str) -> bytes | None:
    """Return the payload, or None for a file that is missing, unreadable or corrupt.

    A file whose checksum does not match is removed, unless another process has replaced it meanwhile.
    """
    try:
        data = files.read_if(name, lambda data: data[:_HEADER_BYTES] == _header(data[_HEADER_BYTES:]))
    except OSError:
        return None
    return None if data is None else data[_HEADER_BYTES:]


def _header(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n"
