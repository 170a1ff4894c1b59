"""The command ``report``: a study's answer in words, and as an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TypeVar

from trainables.errors import UserError
from tune_cac.cli.arguments import ALLOWED_DROP, STUDY, study_of
from tune_cac.cli.command import argument, command
from tune_cac.messages import say

if TYPE_CHECKING:
    from analysis.io.study_files import Layout
    from analysis.presentation.html import ReportData
    from tune_cac.study.study_result import SearchResult

_Found = TypeVar("_Found")


@command(
    ALLOWED_DROP,
    argument("--all", action="store_true", help="print every trial; into a pipe or file the whole report, as Markdown"),
    argument("--output", metavar="FILE", help="the page (default: report.html in the study)"),
    argument("--picture", metavar="FILE", help="write the trade-off alone as a picture, too: .svg, .png or .pdf"),
    *STUDY,
    help="print the answer of a study and write it as a page to look at, report.html",
)
def run(arguments: argparse.Namespace) -> int:
    """Print a study's report and write its page; works while the study is searched."""
    from analysis.presentation.figures.drawing import picture_of
    from analysis.presentation.figures.outcomes import pareto
    from analysis.presentation.html import report_html
    from analysis.presentation.markdown_report import counts_line, report_markdown
    from analysis.presentation.terminal import ROWS
    from tune_cac.cli.console import print_sentences, terminal_columns, write_asked
    from tune_cac.study.study_result import answer

    layout, info, drop = study_of(arguments)
    found = answer(layout, allowed_drop=drop)
    page = Path(arguments.output) if arguments.output else layout.page
    data = gather(layout, found)
    if arguments.all and terminal_columns() is None:
        print(report_markdown(info, found.trials, found.ranking, found.best, found.allowed_drop,
                              confirmation=found.confirmation))  # fmt: skip
    else:
        if len(found.ranking):
            most = len(found.ranking) if arguments.all else ROWS
            print(found.table(get_terminal_size().columns, most), end="\n\n")
        print_sentences(found.headline, found.cost_line, counts_line(info, found.trials))
    if arguments.picture:
        file = Path(arguments.picture)
        if (figure := pareto(data)) is None:
            raise UserError("--picture shows completed trials, and there are none yet")
        write_asked(file, picture_of(figure, file.suffix.lower()), "the picture to", "choose another --picture")
    write_asked(page, report_html(data), "the page to", "choose another --output")
    say(f"Page: {page}")
    return 0 if len(found.ranking) else 1


def gather(layout: Layout, found: SearchResult) -> ReportData:
    """Collect everything that a study's report shows, without what is missing or cannot be read."""
    from analysis.io.studies import history
    from analysis.metrics.gradient_history import gradient_clusters, gradient_statistics
    from analysis.metrics.ranking import is_control, is_shorter
    from analysis.presentation.best_env import best_env
    from analysis.presentation.html import ReportData
    from analysis.presentation.stage_frame import stage_frame
    from analysis.trace_replay.traces import load_trace
    from tune_cac.study.folder import is_locked

    info, trials, best = layout.read_info(), found.trials, found.best
    trace = _or_none(lambda: load_trace(layout.root, epochs=None if best is None else int(best["epochs"])))
    controls = trials[(is_control(trials) | is_shorter(trials)) & (trials["status"] == "completed")]
    environment = dict(info.versions)
    if trace is not None and "device_kind" in trace.run:
        environment["trained on"] = str(trace.run["device_kind"])
    epochs = _or_none(lambda: history(layout.root))
    return ReportData(
        info=info,
        trials=trials,
        ranking=found.ranking,
        best=best,
        allowed_drop=found.allowed_drop,
        headline=found.headline,
        cost_line=found.cost_line,
        best_env=best_env(info, best, found.allowed_drop, **found.about, beside=found.beside),
        status="running" if is_locked(layout) else "finished",
        gradients=None if epochs is None else gradient_statistics(epochs),
        clusters=gradient_clusters(trials),
        controls=controls if len(controls) else None,
        confirmation=found.confirmation,
        stages=_or_none(lambda: stage_frame(layout.root)),
        environment=environment,
    )


def _or_none(read: Callable[[], _Found]) -> _Found | None:
    try:
        return read()
    except (UserError, OSError):
        return None
