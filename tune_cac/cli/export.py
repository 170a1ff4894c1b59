"""The command ``export``: a trial's settings or the ranking, in other programs' formats."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.errors import UserError, unknown_name
from trainables.quality import read_drop
from tune_cac.cli.options import add_study

if TYPE_CHECKING:
    from analysis.io.layout import Layout, StudyInfo


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "export", parents=[debug], help="a trial's settings or the ranking in other programs' formats",
        description="Write one trial's settings (env, yaml, json; the best's without --trial) or the ranking (csv, "
        "parquet, latex, markdown).",
    )  # fmt: skip
    parser.add_argument(
        "--format", default="env", help="env (default), yaml, json, schedule, csv, parquet, latex or markdown"
    )
    parser.add_argument("--trial", type=int, help="number of the trial (default: the best)")
    parser.add_argument("--output", metavar="FILE", help="write there instead of printing")
    parser.add_argument("--top", type=int, help="rows of the ranking (default: all)")
    parser.add_argument(
        "--allowed-drop", help="how much worse the metric may be, such as 0.005 or 2%% (default: the study's)"
    )
    add_study(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write one trial's settings, by default the best's, or the ranking, to a file or to standard output."""
    from analysis.io.studies import load
    from analysis.metrics.ranking import rank
    from analysis.presentation.export import FORMATS, TABLE_FORMATS, export_table, export_trial
    from tune_cac.cli.console import write_asked
    from tune_cac.study.folder import find_study
    from tune_cac.study.study_result import same_run_line

    format, output = arguments.format, arguments.output
    if format not in FORMATS:
        raise unknown_name("--format", format, FORMATS)
    table = format in TABLE_FORMATS
    if table and arguments.trial is not None:
        raise UserError(
            f"--format {format} is a table of the whole ranking, got --trial {arguments.trial}: "
            "leave it out, or choose env, yaml, json or schedule"
        )
    if not table and arguments.top is not None:
        raise UserError(f"--format {format} is one trial, got --top {arguments.top}: give --trial")
    if arguments.top is not None and arguments.top < 1:
        raise UserError(f"--top must be an integer >= 1, got {arguments.top}")
    if format == "parquet" and output is None:
        raise UserError("--format parquet needs --output, a file: it is no text to print")
    layout = find_study(arguments.results, arguments.study)
    info = layout.read_info()
    drop = info.allowed_drop if arguments.allowed_drop is None else read_drop(arguments.allowed_drop, info.quality)
    content: str | bytes
    if table:
        content = export_table(rank(load(layout.root), allowed_drop=drop), format, top=arguments.top)
    elif arguments.trial is None:
        content = _best(layout, info, drop, format)
    else:
        trials = load(layout.root)
        found = trials[trials["trial"] == arguments.trial]
        if len(found) == 0:
            there = f"it has {trials['trial'].min()} to {trials['trial'].max()}" if len(trials) else "it has none yet"
            raise UserError(f"no trial {arguments.trial} in {layout.root}: {there}")
        trial = found.iloc[0]
        exact = "" if format == "json" or trial["status"] != "completed" else same_run_line(layout.root, trial)
        content = export_trial(trial, info, format, same_run=exact)
    if output is not None:
        write_asked(Path(output), content, "--output")
    else:
        sys.stdout.write(content if isinstance(content, str) else content.decode())
    return 0


def _best(layout: Layout, info: StudyInfo, drop: float | str, format: str) -> str:
    """Return the recommended settings, confirmed ones before others, in the requested format.

    `env` is the text of ``best.env``, `schedule` that of ``best.yaml``.
    """
    from analysis.presentation.export import export_trial
    from analysis.presentation.summary_text import best_env, best_schedule, headline, is_answer
    from tune_cac.study.study_result import answer

    found = answer(layout, allowed_drop=drop)
    best = found.best
    if best is None or not is_answer(best):
        reason = headline(found.ranking, None, drop, sure=found.sure).rstrip(".")
        raise UserError(f"{layout.root} has no best trial to export: {reason[0].lower()}{reason[1:]}; give --trial")
    if format in ("env", "schedule"):
        write = best_env if format == "env" else best_schedule
        text = write(
            info, best, drop, confirmation=found.confirmation, line=found.control_line, same_run=found.same_run
        )
        if text is not None:
            return text
    return export_trial(best, info, format)  # where there is no schedule, it says why
