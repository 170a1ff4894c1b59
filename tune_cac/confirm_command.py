"""The command ``confirm``: retrain the best settings on fresh seeds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tune_cac.showing import print_table


def confirm(arguments: argparse.Namespace) -> int:
    """Confirm; print the table of candidates and the study's answer."""
    from tune_cac.confirming import confirm as confirm_study

    found = confirm_study(
        arguments.study,
        results=Path(arguments.results),
        top=arguments.top,
        seeds=arguments.seeds,
        concurrency=arguments.concurrency,
        checkpoint_budget=arguments.checkpoint_budget,
    )
    cells = [["trial", "seeds", "compute saved", "drop in test accuracy", "interval", "confirmed"]]
    for _, row in found.table.iterrows():
        cells.append(
            [
                str(row["candidate"]),
                str(row["seeds"]),
                f"{100 * row['compute_saved']:.1f} %",
                f"{100 * row['accuracy_drop']:+.2f} points",
                f"{100 * row['drop_low']:+.2f} to {100 * row['drop_high']:+.2f}",
                "yes" if row["confirmed"] else "no",
            ]
        )
    print_table(cells)
    print()
    print(found.headline)
    failed = found.trials[found.trials["status"] == "failed"]
    for _, row in failed.iterrows():
        print(f"run {row['trial']} failed: {row['error']}", file=sys.stderr)
    if found.interrupted:
        print("Interrupted. The same command goes on with what is missing.", file=sys.stderr)
        return 130
    return 1 if len(failed) else 0
