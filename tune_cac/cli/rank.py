"""The command ``rank``: a study's ranked table."""

from __future__ import annotations

import argparse
from typing import Any

from tune_cac.cli.console import answer_of, print_table
from tune_cac.cli.options import add_ranking, add_study


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "rank", parents=[debug], help="print a study's ranked table", description="Print a study's ranked table."
    )
    add_ranking(parser)
    add_study(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a study's ranked table."""
    found, _, _ = answer_of(arguments)
    print_table(found.table(top=arguments.top))
    print()
    print(found.headline)
    print(found.cost_line)
    return 0 if len(found.ranking) else 1
