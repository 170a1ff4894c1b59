"""The command ``rank``: a study's ranked table."""

from __future__ import annotations

import argparse

from tune_cac.cli.arguments import RANKING, STUDY
from tune_cac.cli.command import command
from tune_cac.cli.console import answer_of, print_table


@command(*RANKING, *STUDY, help="print a study's ranked table")
def run(arguments: argparse.Namespace) -> int:
    """Print a study's ranked table, and its answer."""
    _, _, found = answer_of(arguments)
    print_table(found.table(top=arguments.top))
    print(f"\n{found.headline}\n{found.cost_line}")
    return 0 if len(found.ranking) else 1
