"""Atomic writing of one file; the only place of the project that writes beside a file and renames."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: Temporary names begin with a dot and end with this suffix.
TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` at the end of the block, and leaves it unchanged if the block fails.

    A reader sees the old file, the new one or none, also after this process was killed. A machine that crashes may lose
    blocks of a renamed file, which only a checksum detects (`trainables.stage_tree.atomic_files`).

    Args:
        path: in an existing folder, which also holds the temporary file; its permissions follow the umask.

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); the temporary file is removed.
    """
    # The random part distinguishes threads, and processes of equal number on two nodes. The name is cut, since the
    # file system limits its length.
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
