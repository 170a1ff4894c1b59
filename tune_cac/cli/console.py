"""Output shared by several commands: files, tables of text cells, and lists."""

from __future__ import annotations

import errno
import math
import os
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from shutil import get_terminal_size

from analysis.formatting import wrapped
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
    """Write an output file of a command atomically, in a folder that is made if it is not there.

    UserError names it and the way out where it cannot be written.
    """
    check_asked(path, what, instead)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise cannot_write(f"{what} {path}", error, instead) from None


def terminal_columns() -> int | None:
    """Return the width of the terminal that standard output is; None where it is none."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def print_sentences(*sentences: str) -> None:
    """Print each in lines of its own: of a terminal's width, so that no number is cut, elsewhere in one."""
    for text in sentences:
        if (width := terminal_columns()) is not None:
            text = "\n".join(wrapped(text, width, break_long_words=False, break_on_hyphens=False))
        print(text)


def print_table(cells: list[list[str]], *, less: Iterable[str] = ()) -> None:
    """Print aligned columns, the header first; a terminal without room for all lacks ``less``, one by one."""
    columns = list(zip(*cells, strict=True))
    widths = {column: max(map(len, column)) for column in columns}
    for name in less:
        if sum(widths[column] + 2 for column in columns) - 2 > (terminal_columns() or math.inf):
            columns = [column for column in columns if column[0] != name]
    for row in zip(*columns, strict=True):
        print("  ".join(cell.ljust(widths[column]) for cell, column in zip(row, columns, strict=True)).rstrip())


def print_list(entries: dict[str, str]) -> None:
    """Print names with their descriptions, wrapped; below the names where a terminal has no room beside them."""
    room, beside = min(110, terminal_columns() or 110), max(map(len, entries)) + 2
    if beside > room / 2:
        beside = 4
    for name, text in entries.items():
        first = f"{name:<{beside}}" if len(name) < beside else name + "\n" + " " * beside
        lines = textwrap.wrap(text, room - beside, break_on_hyphens=False)
        print(first + ("\n" + " " * beside).join(lines))
