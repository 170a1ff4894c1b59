"""Input and output shared by several commands: a study's answer by their arguments, files, and tables of text cells."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from trainables.errors import UserError, cannot_write
from trainables.storage import atomic_write
from tune_cac.cli.arguments import study_of

if TYPE_CHECKING:
    from analysis.io.layout import Layout, StudyInfo
    from tune_cac.study.study_result import SearchResult


def answer_of(arguments: argparse.Namespace) -> tuple[Layout, StudyInfo, SearchResult]:
    """Return layout, settings and answer of the study that a command with `RANKING` asks for."""
    from tune_cac.study.study_result import answer

    layout, info, drop = study_of(arguments)
    return layout, info, answer(layout, allowed_drop=drop, price=arguments.price)


def write_asked(path: Path, content: str | bytes, what: str, instead: str = "choose another file") -> None:
    """Write an output file of a command atomically; UserError names it and the way out where it cannot be written."""
    if path.is_dir():
        raise UserError(f"cannot write {what} {path}: Is a directory; {instead}")
    try:
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise cannot_write(f"{what} {path}", error, instead) from None


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
