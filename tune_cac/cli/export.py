"""The command ``export``: a trial's settings or the ranking, in other programs' formats."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.errors import UserError, unknown_name
from tune_cac.cli.options import add_study

if TYPE_CHECKING:
    from analysis.io.layout import Layout


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
    parser.add_argument("--allowed-drop", type=float, help="accuracy that may be lost (default: the study's)")
    add_study(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write one trial's settings, by default the best's, or the ranking, to a file or to standard output."""
    from analysis.presentation.export import FORMATS, TABLE_FORMATS
    from tune_cac.cli.console import write_asked

    if arguments.format not in FORMATS:
        raise unknown_name("--format", arguments.format, FORMATS)
    table = arguments.format in TABLE_FORMATS
    if table and arguments.trial is not None:
        raise UserError(
            f"--format {arguments.format} is a table of the whole ranking, got --trial {arguments.trial}: "
            "leave it out, or choose env, yaml, json or schedule"
        )
    if not table and arguments.top is not None:
        raise UserError(f"--format {arguments.format} is one trial, got --top {arguments.top}: give --trial")
    if arguments.top is not None and arguments.top < 1:
        raise UserError(f"--top must be an integer >= 1, got {arguments.top}")
    if arguments.format == "parquet" and arguments.output is None:
        raise UserError("--format parquet needs --output, a file: it is no text to print")
    from analysis.metrics.ranking import check_allowed_drop
    from tune_cac.study.folder import find_study

    if arguments.allowed_drop is not None:
        check_allowed_drop(arguments.allowed_drop)
    layout = find_study(Path(arguments.results), arguments.study)
    content = _table(layout, arguments) if table else _trial(layout, arguments)
    if arguments.output is not None:
        write_asked(Path(arguments.output), content, "--output")
    else:
        sys.stdout.write(content if isinstance(content, str) else content.decode())
    return 0


def _table(layout: Layout, arguments: argparse.Namespace) -> str | bytes:
    from analysis.io.studies import load
    from analysis.metrics.ranking import rank
    from analysis.presentation.export import export_table

    ranking = rank(load(layout.root), allowed_drop=_allowed_drop(layout, arguments))
    return export_table(ranking, arguments.format, top=arguments.top)


def _trial(layout: Layout, arguments: argparse.Namespace) -> str:
    from analysis.io.studies import load
    from analysis.presentation.export import export_trial

    if arguments.trial is None:
        return _best(layout, arguments)
    trials = load(layout.root)
    found = trials[trials["trial"] == arguments.trial]
    if len(found) == 0:
        there = f"it has {trials['trial'].min()} to {trials['trial'].max()}" if len(trials) else "it has none yet"
        raise UserError(f"no trial {arguments.trial} in {layout.root}: {there}")
    return export_trial(found.iloc[0], layout.read_info(), arguments.format)


def _best(layout: Layout, arguments: argparse.Namespace) -> str:
    """Return the recommended settings, confirmed ones before others, in the requested format.

    `env` is the text of ``best.env``, `schedule` that of ``best.yaml``.
    """
    from analysis.presentation.export import export_trial
    from analysis.presentation.summary_text import best_env, best_schedule, headline, is_answer
    from tune_cac.study.study_result import answer

    drop, info = _allowed_drop(layout, arguments), layout.read_info()
    found = answer(layout, allowed_drop=drop)
    best = found.best
    if best is None or not is_answer(best):
        reason = headline(found.ranking, None, drop).rstrip(".")
        raise UserError(f"{layout.root} has no best trial to export: {reason[0].lower()}{reason[1:]}; give --trial")
    if arguments.format == "env":
        return best_env(info, best, drop, confirmation=found.confirmation, line=found.control_line)
    if arguments.format == "schedule":
        schedule = best_schedule(info, best, drop, confirmation=found.confirmation, line=found.control_line)
        if schedule is not None:
            return schedule
    return export_trial(best, info, arguments.format)


def _allowed_drop(layout: Layout, arguments: argparse.Namespace) -> float:
    return layout.read_info().allowed_drop if arguments.allowed_drop is None else float(arguments.allowed_drop)
