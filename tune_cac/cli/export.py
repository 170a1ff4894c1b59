"""The command ``export``: a trial's settings in other programs' formats."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainables.errors import UserError, unknown_name
from tune_cac.cli.arguments import ALLOWED_DROP, STUDY, study_of
from tune_cac.cli.command import argument, command

if TYPE_CHECKING:
    import pandas as pd

    from analysis.io.study_files import Layout, StudyInfo
    from analysis.trace_replay.traces import RunTrace
    from tune_cac.study.study_result import SearchResult


@command(
    argument("--as", dest="format", default="env", help="env, yaml, json, schedule, torch or finetuning-scheduler"),
    argument("--trial", type=int, help="number of the trial (default: the best)"),
    argument("--output", metavar="FILE", help="write there instead of printing"),
    ALLOWED_DROP,
    *STUDY,
    help="write a trial's settings in other programs' formats",
)
def run(arguments: argparse.Namespace) -> int:
    """Write one trial's settings, by default the best's, to a file or to standard output."""
    from analysis.presentation.export import TRIAL_FORMATS
    from tune_cac.cli.console import write_asked

    format, output = arguments.format, arguments.output
    if format not in TRIAL_FORMATS:
        raise unknown_name("--as", format, TRIAL_FORMATS)
    layout, info, drop = study_of(arguments)
    if arguments.trial is None:
        content = _best(layout, info, drop, format)
    else:
        content = _trial(layout, info, arguments.trial, format)
    if output is None:
        sys.stdout.write(content)
    else:
        write_asked(Path(output), content, "--output")
    return 0


def _trial(layout: Layout, info: StudyInfo, number: int, format: str) -> str:
    from analysis.presentation.export import export_trial

    row = trial_of_study(layout, number)
    return export_trial(row, info, format, _recorded(layout, row, format))


def trial_of_study(layout: Layout, number: int) -> pd.Series:
    """Return the row of a study's trial; UserError if it has none of that number."""
    from analysis.io.studies import load

    trials = load(layout.root)
    found = trials[trials["trial"] == number]
    if len(found) == 0:
        there = f"it has {trials['trial'].min()} to {trials['trial'].max()}" if len(trials) else "it has none yet"
        raise UserError(f"no trial {number} in {layout.root}: {there}")
    return found.iloc[0]


def answer_of_study(layout: Layout, drop: float | str) -> tuple[SearchResult, pd.Series]:
    """Return a study's result and its best trial; UserError if it has none."""
    from analysis.presentation.summary_text import headline, is_answer
    from tune_cac.study.study_result import answer

    found = answer(layout, allowed_drop=drop)
    if found.best is None or not is_answer(found.best):
        reason = headline(found.ranking, None, drop).rstrip(".")
        raise UserError(f"{layout.root} has no best trial to export: {reason[0].lower()}{reason[1:]}; give --trial")
    return found, found.best


def _recorded(layout: Layout, trial: pd.Series, format: str) -> RunTrace | None:
    """Return the recorded training of the trial's length; None if there is none, or the format needs none."""
    if format not in ("torch", "finetuning-scheduler"):
        return None
    from analysis.trace_replay.traces import load_trace

    try:
        return load_trace(layout.root, epochs=int(trial["epochs"]))
    except UserError:
        return None


def _best(layout: Layout, info: StudyInfo, drop: float | str, format: str) -> str:
    """Return the recommended settings; as ``env`` the text of ``best.env``, as ``schedule`` that of ``best.yaml``."""
    from analysis.presentation.best_env import best_env, best_schedule
    from analysis.presentation.export import export_trial

    found, best = answer_of_study(layout, drop)
    if format in ("env", "schedule"):
        write = best_env if format == "env" else best_schedule
        if text := write(info, best, drop, **found.about):
            return text
    # Where there is no schedule, it says why.
    return export_trial(best, info, format, _recorded(layout, best, format))
