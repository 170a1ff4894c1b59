"""The command ``search``: search a space, or finish a study."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import yaml

from analysis.io.study_files import Layout
from analysis.io.study_options import options_of
from trainables.errors import UserError, unknown_name
from tune_cac.cli.arguments import DATA_AND_MODEL, workload_options
from tune_cac.cli.command import HelpAll, argument, argument_of, command
from tune_cac.messages import say
from tune_cac.study.fixed_params import read_assignments
from tune_cac.study.search_options import SearchOptions

OPTIONS = options_of(SearchOptions)


@command(
    argument("--help-all", action=HelpAll, nargs=0, help="show all options, the rare ones too"),
    *map(argument_of, OPTIONS),
    *DATA_AND_MODEL,
    argument("--resume", metavar="NAME", help="finish the remaining trials of a study"),
    argument(
        "--study", metavar="FILE", help="options in a YAML file, by their names in Python (trials: 12, hold: {...}); "
        "those on the command line win",
    ),
    usage="tune_cac search [OPTION ...]",
    help="search a space on a workload",
    description="Search a space on a workload with Ray and Optuna. The first trial is the baseline (method off), "
    "the next the space's starting point, as a rule the published defaults scaled to the run's length. Accuracies "
    "and accuracy losses are fractions: 0.005 is half a point.",
    epilog="--help-all lists samplers, controls, resources, budgets and more.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Search a space or resume a study; print the ranked table."""
    given = options_given(arguments)
    from analysis.presentation.summary_text import is_answer, trial_numbers
    from tune_cac.cli.console import print_sentences
    from tune_cac.tuning.run import resume as resume_study
    from tune_cac.tuning.run import search as search_study

    found = search_study(**given) if arguments.resume is None else resume_study(arguments.resume, **given)
    if sys.stdout.isatty():
        print()
    if len(found.ranking):
        print(found.table(get_terminal_size().columns))
        print()
    print_sentences(found.headline, found.cost_line)
    layout = Layout(found.folder)
    kept = [file.name for file in (layout.best_schedule, layout.best) if file.exists()]
    folder = shlex.quote(str(found.folder))
    report, resume = f"python -m tune_cac report {folder}", f"python -m tune_cac search --resume {folder}"
    # A file that switches everything off is no answer to paste.
    print(
        f"Settings: {found.folder / kept[0]}   report: {report}"
        if kept and is_answer(found.best)
        else f"Report: {report}"
    )
    failures = found.failures
    for error, trials in failures.groupby("error", sort=False, dropna=False)["trial"]:
        say(f"{trial_numbers(list(trials))} failed: {error}")
    if len(failures):
        say(f"{len(failures)} of {len(found.trials)} trials failed")
    if found.interrupted:
        say(f"Interrupted. Finish the remaining trials with: {resume}")
        return 130
    if found.used_up:
        say(found.used_up)
    return 1 if len(failures) or (len(found.ranking) == 0 and not found.used_up) else 0


def options_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are given; raise UserError for wrong ones, before torch or ray is loaded."""
    if arguments.resume is not None:
        _refuse_settled(arguments)
    given = {} if arguments.study is None else _study_file(Path(arguments.study))
    given |= {one.name: value for one in OPTIONS if (value := getattr(arguments, one.name)) is not None}
    if (texts := workload_options(arguments)) is not None:
        given["workload_options"] = texts
    if arguments.hold is not None:
        given["hold"] = read_assignments(arguments.hold)
    SearchOptions(**given)
    if given.get("script") is not None and arguments.workload == SearchOptions.workload:  # others it has refused
        raise UserError(f"--script trains with a command of yours, so it takes no --workload, got {arguments.workload}")
    return given


def _study_file(file: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--study must be a YAML file of options, {file} cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise UserError(f"--study must be a YAML map of options, such as trials: 12, got {file} with {given!r}")
    names = [one.name for one in OPTIONS]
    for name in given:
        if name not in names:
            raise unknown_name("option", str(name), names)
    return given


def _refuse_settled(arguments: argparse.Namespace) -> None:
    """Raise UserError where an option is given that the study to be resumed has settled."""
    flags = {one.name: one.flag for one in OPTIONS if not one.on_resume}
    flags |= {"data": "--data", "model": "--model", "weights": "--weights", "study": "--study"}
    given = [flag for name, flag in flags.items() if getattr(arguments, name) is not None]
    if given:
        raise UserError(
            f"--resume finishes a study as it was begun, so it takes no {', '.join(given)}: leave that out, "
            "or use --name without --resume to add trials"
        )
