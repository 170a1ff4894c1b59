"""The command ``spaces``: list the search spaces, or show one with its ranges."""

from __future__ import annotations

import argparse
from dataclasses import replace

import search_spaces
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.gradskip.variables import BY_NAME
from trainables.registry import METHODS, check_workload
from trainables.savings import saved_words
from trainables.workloads import default_epochs
from tune_cac.cli.arguments import WORKLOAD_OPTIONS, workload_options
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_list, print_sentences, print_table


@command(
    argument("space", nargs="?", metavar="SPACE", help="show this one"),
    argument("--workload", default="digits", help="whose run the ranges are for"),
    *WORKLOAD_OPTIONS,
    argument("--epochs", at_least=1, help="epochs of that run (default: the workload's)"),
    help="list the search spaces, or show one with its ranges",
)
def run(arguments: argparse.Namespace) -> int:
    """List the spaces, or show one: ranges on a run, published defaults, meanings."""
    if arguments.space is None:
        print_list(search_spaces.SPACES)
        print()
        print_sentences("Ranges and meanings of one, or of yours: python -m tune_cac spaces NAME")
        return 0
    space = search_spaces.load(arguments.space)
    given = workload_options(arguments) or ()
    check_workload(arguments.workload, given)
    from tune_cac.tuning.run_context import check_searched_options, run_context

    check_searched_options(space, arguments.workload, given)
    options = search_spaces.first_options(space, given)
    epochs = arguments.epochs or default_epochs(arguments.workload, options)
    config = TrialConfig(
        workload=arguments.workload, workload_options=options, epochs=epochs, method="none", saving=space.saving
    )
    context = replace(run_context(config, caches=space.uses_forward_cache), workload_options=tuple(given))
    print_sentences(
        f"{space.name}: {space.description}",
        f"method {space.method}: {METHODS[space.method].description}; ranked by {saved_words(space.saving)}",
        f"on {config.workload} for {config.epochs} epochs, {context.total_steps} steps",
    )
    print()
    if notes := space.notes(context):
        print_sentences(*notes)
        print()
    start, ranges = space.start(context), describe(space, context)
    if not ranges:
        return 0
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
    print_table(table)
    return 0
