"""The command ``tree``: a study's stage tree as text."""

from __future__ import annotations

import argparse
import sys

from trainables.errors import UserError
from trainables.registry import SCRIPT
from tune_cac.cli.arguments import STUDY
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_sentences


@command(
    argument("--depth", at_least=0, help="interventions to go down to (default: all)"),
    argument("--top", default=40, at_least=1, help="stages to show, the most visited"),
    *STUDY,
    help="draw a study's stage tree: what its trials trained, shared stretches once",
    description="Draw a study's stage tree, one line a stage: the iteration at which trials did something, what, up to "
    "which iteration it was trained, how many trials go through, and the result of those that end there.",
)
def run(arguments: argparse.Namespace) -> int:
    """Print a study's stage tree."""
    from analysis.formatting import plural
    from analysis.io.studies import load
    from analysis.metrics.accounting import search_cost
    from analysis.presentation.markdown_report import search_cost_line
    from analysis.presentation.stage_frame import stage_frame, tree_text
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    stages, reason = stage_frame(layout.root), ""
    if layout.read_info().workload == SCRIPT:
        reason = "trials of a script share no training"
    elif len(stages) == 0:
        reason = "it is of an earlier version, or its baseline has not begun; search to get one"
    elif not stages["trials"].map(len).any():
        reason = (
            "its trials were trained alone (--no-sharing), or none has ended; search without --no-sharing to get one"
        )
    if reason:
        raise UserError(f"{layout.root} has no stage tree: {reason}")
    kept, megabytes = int(stages["checkpoints"].sum()), stages["checkpoint_bytes"].sum() / 1e6
    print_sentences(search_cost_line(search_cost(load(layout.root))))
    print(f"{plural(len(stages), 'stage')}, {plural(kept, 'checkpoint')} ({megabytes:.1f} MB)\n")
    text = tree_text(stages, depth=arguments.depth, top=arguments.top)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # the terminal has no box characters
        text = text.translate(str.maketrans("├└│─", "|`|-"))
    print(text)
    return 0
