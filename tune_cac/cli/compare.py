"""The command ``compare``: studies of the same training side by side, as tables and as a picture on request."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainables.errors import UserError
from tune_cac.cli.arguments import ALLOWED_DROP, HTML, RESULTS_FOLDER
from tune_cac.cli.command import argument, command


@command(
    argument("studies", nargs="+", metavar="STUDY", help="folders of studies, or names under --results"),
    ALLOWED_DROP,
    argument("--top", default=20, at_least=1, help="rows of the joint front to show"),
    argument(
        "--budgets", metavar="SHARES", help="shares of the dense run's FLOPs at which the studies are compared, such "
        "as 0.5,1,4 (default: quarters)",
    ),
    HTML,
    RESULTS_FOLDER,
    help="several studies of the same training side by side",
    description="Compare studies of one workload and length that searched different spaces: what each saves within "
    "the allowed drop, Pareto front against Pareto front, hypervolume, and what the searches cost.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Print the comparison of two or more studies; write its picture to ``--html`` if given.

    Returns:
        0; 1 if no study has a trial that can be compared.
    """
    from analysis.formatting import drop_words, plotted, plural, unit_of_drop
    from analysis.metrics.compute_budgets import BUDGETS, check_budgets, equal_compute
    from analysis.presentation.figures.comparison import fronts
    from analysis.presentation.html import figure_html
    from analysis.presentation.study_comparison import compare as compare_studies
    from analysis.presentation.study_comparison import (
        comparison_line,
        comparison_table,
        equal_compute_table,
        joint_front_table,
    )
    from tune_cac.cli.console import print_table, read_numbers, write_asked
    from tune_cac.study.folder import find_study

    budgets = BUDGETS if arguments.budgets is None else read_numbers("--budgets", arguments.budgets, "0.5,1,4")
    check_budgets(budgets)
    roots = [find_study(arguments.results, name).root for name in arguments.studies]
    found = compare_studies(roots, allowed_drop=arguments.allowed_drop)
    if arguments.html is not None:
        title = f"{found.workload}, {found.length}: Pareto fronts"
        write_asked(Path(arguments.html), figure_html(title, fronts(found)), "--html")
    print(f"{found.workload}, {found.length}\n")
    print_table(comparison_table(found))
    front, quality = len(found.joint_front), found.quality
    if front:
        shown = f", {arguments.top} of them" if front > arguments.top else ""
        print(f"\nJoint front, {plural(front, 'trial')}{shown}:\n")
        print_table(joint_front_table(found, top=arguments.top))
    try:
        reached = equal_compute(roots, budgets)
    except UserError as error:  # of studies whose fronts can be compared nevertheless
        print(f"\nNo comparison at equal compute: {error}")
    else:
        print("\nAt equal compute, shares of the dense run's FLOPs; each trial as it was then, in its own schedule:\n")
        print_table(equal_compute_table(reached, quality))
    words = "an accuracy loss" if quality.is_accuracy else f"a {drop_words(quality)}"
    reference = f"{words} of {float(plotted(found.reference_drop, quality)):g} {unit_of_drop(quality)}".rstrip()
    print(f"\n{comparison_line(found)}")
    print(
        f"Hypervolume: above nothing saved at {reference}. One seed a trial: "
        f"{'differences of a few tenths of a point' if quality.is_fraction else 'small differences'} are noise."
    )
    for note in found.notes:
        print(f"Note: {note}")
    if arguments.html is not None:
        print(f"Picture: {arguments.html}")
    return 0 if len(found.candidates) else 1
