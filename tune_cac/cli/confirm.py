"""The command ``confirm``: retrain the best settings on fresh seeds."""

from __future__ import annotations

import argparse

from analysis.io.study_options import options_of
from trainables.savings import saved_words
from tune_cac.cli.arguments import STUDY
from tune_cac.cli.command import argument, argument_of, command
from tune_cac.cli.console import print_sentences, print_table
from tune_cac.messages import say
from tune_cac.study.search_options import SearchOptions


@command(
    argument("--top", type=int, default=5, help="settings to retrain"),
    argument("--seeds", type=int, default=5, help="fresh seeds"),
    argument(
        "--until-decided",
        action="store_true",
        help="look at the results after 3, 6, 12, ... seeds and go on with what is neither confirmed nor refuted; "
        "intervals are wider by that",
    ),
    argument("--concurrency", type=int, help="runs at a time (default: what the assigned processors allow)"),
    *(argument_of(one) for one in options_of(SearchOptions) if one.name in ("checkpoint_budget", "address")),
    *STUDY,
    help="retrain a study's best settings and its baseline on fresh seeds",
    description="Retrain the settings of a study that save most within the allowed drop, and its "
    "baseline, on seeds that the search has not seen; say which of them are confirmed, on the test split, with "
    "intervals. Run again, it continues where it was interrupted, or adds settings and seeds.",
)
def run(arguments: argparse.Namespace) -> int:
    """Run the confirmation; print the table of candidates and the study's answer."""
    from analysis.io.studies import load
    from analysis.io.study_files import Layout
    from analysis.metrics.accounting import search_cost
    from analysis.metrics.ranking import allowed_limit
    from analysis.metrics.saving import saving_of
    from analysis.presentation.markdown_report import confirmation_table, search_cost_line
    from tune_cac.tuning.confirmation import confirm as confirm_study

    found = confirm_study(
        arguments.study,
        results=arguments.results,
        top=arguments.top,
        seeds=arguments.seeds,
        until_decided=arguments.until_decided,
        concurrency=arguments.concurrency,
        checkpoint_budget=arguments.checkpoint_budget or SearchOptions.checkpoint_budget,
        address=arguments.address,
    )
    layout = Layout(found.folder)
    trials = load(layout.confirmation.root)
    if found.confirmation is not None:
        allowed = allowed_limit(found.ranking, found.allowed_drop)
        saved = saved_words(saving_of(found.trials))
        cells = confirmation_table(found.confirmation, saved, allowed, layout.read_info().quality)
        print_table(cells, less=["confidence", "worst seed"])
        print()
    print_sentences(found.headline)
    print_sentences(search_cost_line(search_cost(trials), of="Cost of the confirmation"))
    failed = trials[trials["status"] == "failed"]
    for _, row in failed.iterrows():
        say(f"run {row['trial']} failed: {row['error']}")
    if found.interrupted:
        say("Interrupted. The same command goes on with what is missing.")
        return 130
    return 1 if len(failed) else 0
