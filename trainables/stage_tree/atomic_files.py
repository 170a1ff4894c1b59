"""Files that are whole or not there, whoever reads and writes them at the same time.

A file is written under a temporary name in its own folder and then renamed, so a reader sees the old file, the new
one or none. A checksum in the first line finds what a rename cannot prevent: blocks that a crashed machine never wrote.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

#: Temporary names begin with a dot and end with this; no file of the stage tree does.
TEMPORARY_SUFFIX = ".tmp"

_HEADER_BYTES = 65  # 64 hexadecimal digits and a line feed


def write_framed(path: Path, payload: bytes) -> None:
    """Write a payload with its checksum; ``path`` has all of it or what it had before.

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); nothing of it is left.
    """
    write_atomically(path, hashlib.sha256(payload).hexdigest().encode() + b"\n", payload)


def read_framed(path: Path) -> bytes | None:
    """The payload, or None if there is no such file, it cannot be read, or it is not what was written.

    A file whose checksum does not hold is removed, unless another process has replaced it meanwhile.
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
    """Put a file with these parts at ``path`` in one step; folders that are missing are made.

    Raises:
        OSError: it cannot be written; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The random part tells apart processes of one number on two nodes, and threads.
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
    """Remove a file found to be bad, if it is still the one that was read.

    Args:
        path: where it lay.
        read: its state, of the file as opened. Call this while it is open: then no other file can have its number.
    """
    with suppress(OSError):
        if os.path.samestat(os.stat(path), read):
            path.unlink()
