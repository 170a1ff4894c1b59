"""The command ``replay``: predict what settings would stop and save on a study's run, without training."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.formatting import plural
from trainables.config import method_of
from trainables.errors import UserError, cannot_write
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, VARIABLES
from tune_cac.cli.arguments import ASSIGNMENTS, STUDY
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_sentences
from tune_cac.study.fixed_params import read_assignments

if TYPE_CHECKING:
    from analysis.io.study_files import Layout
    from analysis.trace_replay.traces import RunTrace


@command(
    ASSIGNMENTS,
    argument(
        "--finetuning-scheduler",
        metavar="FILE",
        help="freeze what this schedule of that library never thaws; prints the settings that say so",
    ),
    argument("--root", help="id of the recorded run, or how it begins, where the study has several"),
    *STUDY,
    help="predict what settings stop and save, from a study's recorded training",
    description="Predict what settings stop and save on a study's run without training: exact as far as trials "
    "were trained so, an estimate from the run without a method after it. CAC_* variables of the environment "
    "count; --set wins.",
)
def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for one setting."""
    values = read_assignments(arguments.assignments)
    if (method := method_of(values)) not in ("none", "gradskip"):
        raise UserError(
            f"replay predicts Gradient-Skip alone, got settings of {method}: what they save is known from trials, "
            "so search them"
        )
    import analysis
    from analysis.trace_replay.traces import OF_SCRIPT, load_trace
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    trace, info = load_trace(layout.root, root=arguments.root), layout.read_info()
    of = trace.run
    searched = [text for text in of.get("workload_options", ()) if text not in info.workload_options]
    what = " ".join([of["workload"], *searched])
    length = "" if of.get(OF_SCRIPT) else f"{plural(of['epochs'], 'epoch')}, "
    print_sentences(f"{what}, {length}{plural(trace.total_steps, 'step')}, seed {of['seed']}")
    given = {**{name: value for name, value in info.hold.items() if not os.environ.get(name, "").strip()}, **values}
    if of.get(OF_SCRIPT) and not os.environ.get("CAC_WATCH"):
        given.setdefault("CAC_WATCH", trace.recorded_watch)
    if arguments.finetuning_scheduler is not None:
        given |= _frozen_by(Path(arguments.finetuning_scheduler), layout, trace, given)
    settings = Settings.from_environment(**{name: value for name, value in given.items() if name in BY_NAME})
    print_sentences("  ".join(f"{k}={v}" for k, v in settings.to_environment().items()))
    config = trace.config_of({**given, **{v.name: getattr(settings, v.field) for v in VARIABLES}})
    trace = _completed(layout, trace, config)
    found = {str(k): v for k, v in analysis.replay(trace, config).iloc[0].items()}
    trained_as = []
    if found["exact"]:
        trials = analysis.load(layout.root)
        trained_as = trials.loc[
            (trials["stage"] == found["stage"]) & (trials["status"] == "completed"), "trial"
        ].tolist()
    print_sentences(*prediction_lines(found, trace, trained_as, settings))
    return 0


def _frozen_by(schedule: Path, layout: Layout, trace: RunTrace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that freeze what a schedule of finetuning-scheduler never thaws on the study's model."""
    from analysis.presentation.thawing import stop_of_schedule

    try:
        text = schedule.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read schedule {schedule}: {getattr(error, 'strerror', None) or error}") from None
    config = trace.config_of({**given, "CAC_STOP_LAYER_NUM": (0,), "CAC_STOP_LAYER_ITR": (-1,)})
    plan = _completed(layout, trace, config).blueprint(config).plan
    order = [number for number in plan.order if trace.trains[number] == "1"]
    return stop_of_schedule(text, trace.layer_names, order)


def _completed(layout: Layout, trace: RunTrace, settings: Any) -> RunTrace:
    """Return the trace with the layer plans and costs that the settings need, which are counted and kept."""
    from analysis.trace_replay.replay_frame import missing_costs, missing_facts

    if not missing_facts(trace, settings) and not missing_costs(trace, settings):
        return trace  # the usual case: torch need not be loaded
    from trainables.stage_tree.store import StageStore
    from tune_cac.tuning import baseline

    store = StageStore(layout.shared_tree, trace.root)
    try:
        return baseline.completed(store, trace, settings)
    except OSError as error:
        raise cannot_write(f"what steps cost to {store.tree}", error, "replay a copy of the study") from None


def prediction_lines(
    found: Mapping[str, Any], trace: RunTrace, trained_as: Sequence[int], settings: Settings
) -> list[str]:
    """Return a row of `analysis.replay` in words: its stops, or why there are none, what is saved, what is exact.

    ``trained_as`` are the numbers of the study's trials that end in the predicted stage.
    """
    from analysis.formatting import percent, value_text
    from trainables.gradskip.nothing_stops import why_nothing_stopped
    from trainables.gradskip.variables import ratio_name

    lines, until = [], found["exact_until"]
    for event in json.loads(found["stop_events"]):
        ratio = "" if event["ratio"] is None else f" at {ratio_name(event['rule'])} {event['ratio']:.4f}"
        estimated = "" if event["iteration"] < until else " (estimate)"
        lines.append(
            f"iteration {event['iteration']}: stops through {event['layer']} ({event['name']}), {event['rule']}{ratio}"
            f"{estimated}"
        )
    if found["compute_saved"] != found["compute_saved"]:
        return [
            *lines,
            f"exact up to iteration {until}, not predicted after it: what {settings.mode} looks at is recorded only "
            "where a trial with the same timings has run it",
        ]
    if not lines:
        lines.append(f"stops nothing: {why_nothing_stopped(settings, trace.total_steps)}")
    lines.append(f"compute saved {percent(found['compute_saved'])} (backward {percent(found['backward_saved'])})")
    quality = trace.quality
    if found["exact"]:
        trials = f" as trial {' and '.join(map(str, trained_as))}" if trained_as else ""
        return [*lines, f"exact: trained before{trials}, {quality.name} {value_text(found[quality.name], quality)}"]
    if until >= trace.total_steps:
        end = f"exact in stops and savings; this run was not trained to its end, so its {quality.name} is not known"
        return [*lines, end]
    source = "the dense run" if found["stage"] == trace.dense.id else "the nearest recorded run"
    return [*lines, f"exact up to iteration {until}, estimated from {source} after it"]
