"""The command ``studies``: list the studies of a folder, or delete some."""

from __future__ import annotations

import argparse
import shutil
import sys
from datetime import datetime
from pathlib import Path

from analysis.io.study_options import RESULTS, results_here
from trainables.errors import UserError, cannot_write, unknown_name
from tune_cac.cli.command import argument, command


@command(
    argument("delete", nargs="*", metavar="delete NAME ...", help="delete these studies, after a question"),
    argument("--yes", action="store_true", help="delete without a question"),
    argument("--results", default=RESULTS, help="folder that holds the studies"),
    help="list the studies with their answers, or delete some",
)
def run(arguments: argparse.Namespace) -> int:
    """List studies, the latest first, or delete those that are named behind the word ``delete``."""
    from analysis.formatting import percent
    from analysis.io.study_files import Layout
    from tune_cac.cli.console import print_table
    from tune_cac.study.folder import is_locked

    folder = results_here(arguments.results)
    layouts = {file.parent.name: Layout(file.parent) for file in folder.glob(f"*/{Layout(folder).info.name}")}
    if arguments.delete:
        word, *names = arguments.delete
        if word != "delete" or not names:
            raise UserError(f"studies lists them, and `studies delete NAME ...` deletes some, got {word!r}")
        for name in names:
            if name not in layouts:
                raise unknown_name("study", name, layouts)
            if layouts[name].root.is_symlink() or is_locked(layouts[name]):
                raise UserError(f"{layouts[name].root} must not be deleted: it is being searched, or a link")
            if foreign := layouts[name].foreign():
                raise UserError(
                    f"{layouts[name].root} must hold nothing but a study to be deleted, got {', '.join(foreign[:3])}"
                    f"{' and more' * (len(foreign) > 3)}: move that away, or delete the folder by hand"
                )
            if not layouts[name].journal.exists():
                layouts[name].read_info()  # a study that has not begun; else it is a file of the same name
        for name in dict.fromkeys(names):
            _delete(layouts[name].root, _megabytes(layouts[name].root), yes=arguments.yes)
        return 0
    if not layouts:
        raise UserError(f"no study in {folder}: search makes one, or give --results")
    cells = [["date", "state", "trials", "saved", "MB", "study"]]  # a long name wraps, and nothing is behind it
    dates = {name: layout.info.stat().st_mtime for name, layout in layouts.items()}
    for name in sorted(layouts, key=lambda one: -dates[one]):
        layout = layouts[name]
        try:
            info = layout.read_info()
        except UserError:
            cells.append(["", "cannot be read", "", "", f"{_megabytes(layout.root):.1f}", name])
            continue
        ended = layout.ranking.exists() and not info.interrupted
        cells.append([
            f"{datetime.fromtimestamp(dates[name]):%Y-%m-%d %H:%M}",
            "running" if is_locked(layout) else "finished" if ended else "interrupted", str(info.trials),
            percent(info.answer["saved"]) if info.answer else "", f"{_megabytes(layout.root):.1f}", name,
        ])  # fmt: skip
    print_table(cells, less=("MB", "date", "trials"))
    return 0


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def _delete(folder: Path, megabytes: float, *, yes: bool) -> None:
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"{folder} is deleted after a question, and nobody can answer here: give --yes")
        try:
            said = input(f"Delete {folder} ({megabytes:.1f} MB)? [y/N] ")
        except EOFError:
            said = ""
        if said.strip().lower() not in ("y", "yes"):
            return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise cannot_write(str(folder), error, "delete it by hand") from None
    print(f"Deleted {folder}")
