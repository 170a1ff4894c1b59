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
    """Print aligned columns, the header first.

    A terminal without room for all lacks ``less``, one by one; then the last column is wrapped, below the others if no
    room is left beside them.
    """
    room, columns = terminal_columns() or math.inf, list(zip(*cells, strict=True))
    widths = {column: max(map(len, column)) for column in columns}
    for name in less:
        if sum(widths[column] + 2 for column in columns) - 2 > room:
            columns = [column for column in columns if column[0] != name]
    beside = sum(widths[column] + 2 for column in columns[:-1])
    for row in zip(*columns, strict=True):
        line = "".join(f"{cell:<{widths[column]}}  " for cell, column in zip(row[:-1], columns, strict=False))
        if len(line + row[-1]) <= room:
            print((line + row[-1]).rstrip())
        else:
            print(_hanging(line, row[-1], int(room), beside if beside <= room / 2 else 4))


def _hanging(first: str, text: str, width: int, beside: int) -> str:
    """Return a text wrapped from a column on, below what stands first where that reaches farther."""
    lines = textwrap.wrap(text, width - beside, break_on_hyphens=False)
    first = first.rstrip() + "\n" + " " * beside if len(first) > beside else first.ljust(beside)
    return first + ("\n" + " " * beside).join(lines)


def print_list(entries: dict[str, str]) -> None:
    """Print names with their descriptions, wrapped; below the names where a terminal has no room beside them."""
    room, beside = min(110, terminal_columns() or 110), max(map(len, entries)) + 2
    if beside > room / 2:
        beside = 4
    for name, text in entries.items():
        print(_hanging(f"{name}  ", text, room, beside))
