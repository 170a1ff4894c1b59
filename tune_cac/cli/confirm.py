"""The command ``confirm``: retrain the best settings on fresh seeds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from analysis.io.study_options import options_of
from trainables.quality import Quality
from tune_cac.cli.arguments import STUDY
from tune_cac.cli.command import argument, argument_of, command
from tune_cac.cli.console import print_table
from tune_cac.messages import say
from tune_cac.study.search_options import SearchOptions

if TYPE_CHECKING:
    import pandas as pd


@command(
    argument("--top", type=int, default=5, help="settings to retrain"),
    argument("--seeds", type=int, default=5, help="fresh seeds"),
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
    from analysis.io.layout import Layout
    from analysis.io.studies import load
    from analysis.metrics.accounting import search_cost
    from analysis.metrics.ranking import allowed_limit
    from analysis.presentation.markdown_report import search_cost_line
    from tune_cac.tuning.confirmation import confirm as confirm_study

    found = confirm_study(
        arguments.study,
        results=arguments.results,
        top=arguments.top,
        seeds=arguments.seeds,
        concurrency=arguments.concurrency,
        checkpoint_budget=arguments.checkpoint_budget or SearchOptions.checkpoint_budget,
        address=arguments.address,
    )
    layout = Layout(found.folder)
    trials = load(layout.confirmation.root)
    if found.confirmation is not None:
        allowed = allowed_limit(found.ranking, found.allowed_drop)
        print_table(_cells(found.confirmation, layout.read_info().quality, allowed))
        print()
    print(found.headline)
    print(search_cost_line(search_cost(trials), of="Cost of the confirmation"))
    failed = trials[trials["status"] == "failed"]
    for _, row in failed.iterrows():
        say(f"run {row['trial']} failed: {row['error']}")
    if found.interrupted:
        say("Interrupted. The same command goes on with what is missing.")
        return 130
    return 1 if len(failed) else 0


def _cells(table: pd.DataFrame, quality: Quality, allowed: float) -> list[list[str]]:
    from analysis.formatting import drop_number, percent, unit_of_drop
    from analysis.metrics.confirmation import compared

    def shown(drop: float) -> str:
        return drop_number(drop, quality, allowed=allowed, sign="+")

    words = "loss of" if quality.is_accuracy else "drop in" if quality.direction == "max" else "rise in"
    drop, unit = f"{words} {compared(table.iloc[0])}", unit_of_drop(quality)
    cells = [["trial", "seeds", "failed", "saved", drop, "interval", "confirmed"]]
    for _, row in table.iterrows():
        known = row["seeds"] > 0
        cells.append(
            [
                str(row["candidate"]),
                str(row["seeds"]),
                str(row["failed"]),
                percent(row["saved"]) if known else "-",
                f"{shown(row[quality.drop])} {unit}".rstrip() if known else "-",
                f"{shown(row['drop_low'])} to {shown(row['drop_high'])}" if row["seeds"] > 1 else "-",
                "yes" if row["confirmed"] else "refuted" if row["refuted"] else "no",
            ]
        )
    return cells
