"""The command ``tree``: a study's stage tree as text, and as a page on request."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trainables.errors import UserError
from trainables.registry import SCRIPT
from tune_cac.cli.options import add_study


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "tree", parents=[debug], help="draw a study's stage tree: what its trials trained, shared stretches once",
        description="Draw a study's stage tree, one line a stage: the iteration at which trials did something, what, "
        "up to which iteration it was trained, how many trials go through, and the result of those that end there.",
    )  # fmt: skip
    parser.add_argument("--depth", type=int, help="interventions to go down to (default: all)")
    parser.add_argument("--top", type=int, default=40, help="stages to show, the most visited (default: 40)")
    parser.add_argument("--html", metavar="FILE", help="write it as a plot in a page, too")
    add_study(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a study's stage tree; write its plot to ``--html`` if given."""
    if arguments.depth is not None and arguments.depth < 0:
        raise UserError(f"--depth must be an integer >= 0, got {arguments.depth}")
    if arguments.top < 1:
        raise UserError(f"--top must be an integer >= 1, got {arguments.top}")
    from analysis.formatting import plural
    from analysis.io.studies import load
    from analysis.metrics.accounting import search_cost
    from analysis.presentation.figures.stage_tree import stage_tree
    from analysis.presentation.html import figure_html
    from analysis.presentation.markdown_report import full_trainings, search_cost_line
    from analysis.presentation.stage_frame import stage_frame, tree_text
    from tune_cac.cli.console import write_asked
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    if layout.read_info().workload == SCRIPT:
        raise UserError(f"{layout.root} has no stage tree: trials of a script share no training")
    stages = stage_frame(layout.root)
    if len(stages) == 0:
        raise UserError(
            f"{layout.root} has no stage tree: it is of an earlier version, or its baseline has not begun; "
            "search to get one"
        )
    if not stages["trials"].map(len).any():
        raise UserError(
            f"{layout.root} has no stage tree: its trials were trained alone (--no-sharing), or none has ended; "
            "search without --no-sharing to get one"
        )
    cost = search_cost(load(layout.root))
    if arguments.html is not None and (plot := stage_tree(stages)) is not None:
        title = f"{plural(cost.trials, 'trial')}, {full_trainings(cost.dense_equivalents)}"
        write_asked(Path(arguments.html), figure_html(title, plot), "--html")
    kept, megabytes = int(stages["checkpoints"].sum()), stages["checkpoint_bytes"].sum() / 1e6
    print(search_cost_line(cost))
    print(f"{plural(len(stages), 'stage')}, {plural(kept, 'checkpoint')} ({megabytes:.1f} MB)\n")
    print(_printable(tree_text(stages, depth=arguments.depth, top=arguments.top)))
    if arguments.html is not None:
        print(f"\nPicture: {arguments.html}")
    return 0


def _printable(text: str) -> str:
    """Return the text, with ASCII lines if the terminal's encoding lacks box characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(str.maketrans("├└│─", "|`|-"))
    return text
