"""Atomic, checksummed file I/O.

A file is written under a temporary name in its own folder and then renamed, so a reader sees the old file, the new one
or none. A checksum in the first line detects what a rename cannot prevent: blocks that a crashed machine never wrote.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

#: Temporary names begin with a dot and end with this suffix; no other file of the stage tree has it.
TEMPORARY_SUFFIX = ".tmp"

_HEADER_BYTES = 65  # 64 hexadecimal digits and a line feed


def write_checked(path: Path, payload: bytes) -> None:
    """Write a payload with its checksum; ``path`` then has all of it, or its previous content after an error.

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); no part of it is left.
    """
    write_atomically(path, hashlib.sha256(payload).hexdigest().encode() + b"\n", payload)


def read_checked(path: Path) -> bytes | None:
    """Return the payload, or None for a file that is missing, unreadable or corrupt.

    A file whose checksum does not match is removed, unless another process has replaced it meanwhile.
    """
    try:
        with path.open("rb") as file:
            data = file.read()
            payload = data[_HEADER_BYTES:]
            if data[:_HEADER_BYTES] == hashlib.sha256(payload).hexdigest().encode() + b"\n":
                return payload
            remove_what_was_read(path, os.fstat(file.fileno()))
    except OSError:
        pass
    return None


def write_atomically(path: Path, *parts: bytes) -> None:
    """Write a file from these parts to ``path`` atomically; create missing folders.

    Raises:
        OSError: it cannot be written; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The random part distinguishes threads, and processes of equal number on two nodes.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def remove_what_was_read(path: Path, read: os.stat_result) -> None:
    """Remove a corrupt file, if it is still the one that was read.

    Args:
        path: path of the file.
        read: `os.fstat` of the opened file. Call this while it is open: then no other file can have its inode number.
    """
    with suppress(OSError):
        if os.path.samestat(os.stat(path), read):
            path.unlink()
