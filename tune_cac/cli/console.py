"""Output shared by several commands: files, tables of text cells, and lists."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from pathlib import Path
from shutil import get_terminal_size

from trainables.errors import UserError, cannot_write
from trainables.storage import atomic_write


def check_asked(path: Path, what: str, instead: str) -> None:
    """Raise UserError for an output file that cannot be written, before the work that it is for."""
    there = next(one for one in (path.absolute().parent, *path.absolute().parents) if one.exists())
    reason = 0 if os.access(there, os.W_OK) else errno.EACCES
    if path.is_dir() or not there.is_dir():
        reason = errno.EISDIR if path.is_dir() else errno.ENOTDIR
    if reason:
        raise UserError(f"cannot write {what} {path}: {os.strerror(reason)}; {instead}")


def write_asked(path: Path, content: str | bytes, what: str, instead: str = "choose another file") -> None:
    """Write an output file of a command atomically; UserError names it and the way out where it cannot be written."""
    check_asked(path, what, instead)
    try:
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise cannot_write(f"{what} {path}", error, instead) from None


def print_sentences(*sentences: str) -> None:
    """Print each in lines of its own: of a terminal's width, so that no number is cut, elsewhere in one."""
    for text in sentences:
        if sys.stdout.isatty():
            text = textwrap.fill(text, get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
        print(text)


def print_table(cells: list[list[str]]) -> None:
    """Print aligned columns, the header first."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_list(entries: dict[str, str]) -> None:
    """Print names with their descriptions, wrapped."""
    width = max(map(len, entries))
    for name, text in entries.items():
        print(textwrap.fill(text, width=110, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2)))
