"""The command ``spaces``: list the search spaces, or show one with its ranges."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import search_spaces
from search_spaces.space import Range, Space, describe
from trainables.config import TrialConfig, check_integer
from trainables.gradskip.variables import BY_NAME
from trainables.registry import METHODS, check_workload
from trainables.savings import saved_words
from trainables.workloads import default_epochs
from tune_cac.cli.console import print_list, print_table
from tune_cac.cli.workload_arguments import add_workload_options, workload_options


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("spaces", parents=[debug], help="list the search spaces, or show one with its ranges")
    parser.add_argument("space", nargs="?", metavar="SPACE", help="show this one")
    parser.add_argument("--workload", default="digits", help="whose run the ranges are for (default: digits)")
    add_workload_options(parser)
    parser.add_argument("--epochs", type=int, help="epochs of that run (default: the workload's)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the spaces, or show one: ranges on a run, published defaults, meanings."""
    if arguments.space is None:
        print_list(search_spaces.SPACES)
        print("\nRanges and meanings of one, or of yours: python -m tune_cac spaces NAME")
        return 0
    space = search_spaces.load(arguments.space)
    if arguments.epochs is not None:
        check_integer("--epochs", arguments.epochs, 1)
    given = workload_options(arguments) or ()
    check_workload(arguments.workload, given)
    from tune_cac.tuning.run_context import check_searched_options, run_context

    check_searched_options(space, arguments.workload, given)
    options = search_spaces.first_options(space, given)
    epochs = arguments.epochs or default_epochs(arguments.workload, options)
    config = TrialConfig(
        workload=arguments.workload, workload_options=options, epochs=epochs, method="none", saving=space.saving
    )
    context = replace(run_context(config), workload_options=tuple(given))
    print(f"{space.name}: {space.description}")
    print(f"method {space.method}: {METHODS[space.method].description}; ranked by {saved_words(space.saving)}")
    print(f"on {config.workload} for {config.epochs} epochs, {context.total_steps} steps\n")
    notes = space.notes(context)
    if notes:
        print("\n".join(notes) + "\n")
    start, ranges = space.start(context), describe(space, context)
    if ranges:
        print_table(_ranges_table(space, ranges, start))
    return 0


def _ranges_table(space: Space, ranges: list[Range], start: Mapping[str, Any]) -> list[list[str]]:
    """Return one row per parameter, with the column "when" only if some parameters are conditional."""
    conditional = any(found.condition for found in ranges)
    table = [["variable", "searched", *(["when"] if conditional else []), "default", "starts at", "meaning"]]
    for found in ranges:
        variable = BY_NAME.get(found.base_name)
        table.append(
            [
                found.name,
                str(found),
                *([found.condition or "always"] if conditional else []),
                variable.default_text if variable else "",
                str(start.get(found.name, "")),
                space.meaning(found.base_name) or (variable.meaning if variable else ""),
            ]
        )
    return table
