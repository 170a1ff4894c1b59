"""The command ``replay``: predict what settings would stop and save on a study's run, without training."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import search_spaces
from search_spaces import Space
from trainables.errors import UserError, cannot_write
from trainables.gradients.fields import estimator_in, estimator_of
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, VARIABLES
from trainables.quality import ACCURACY, Quality
from tune_cac.cli.arguments import ASSIGNMENTS, STUDY
from tune_cac.cli.command import argument, command
from tune_cac.cli.console import print_table
from tune_cac.study.fixed_params import read_assignments, shown_hold, with_watch

if TYPE_CHECKING:
    import pandas as pd

    from analysis.io.layout import Layout
    from analysis.trace_replay.traces import RunTrace


@command(
    ASSIGNMENTS,
    argument("--random", at_least=1, metavar="N", help="replay so many random settings of a space"),
    argument("--space", help="that space (default: the study's)"),
    argument("--seed", default=0, at_least=0, help="of the random settings"),
    argument("--top", default=20, at_least=1, help="outcomes to show, the most frequent"),
    argument("--root", help="id of the recorded run, or how it begins, where the study has several"),
    *STUDY,
    help="predict what settings stop and save, from a study's recorded training",
    description="Predict what settings stop and save on a study's run without training: exact as far as trials "
    "were trained so, an estimate from the run without a method after it. CAC_* variables of the environment "
    "count; --set wins. With --random, the distinct outcomes of random settings of a space.",
)
def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for one setting, or the outcomes of random settings of a space."""
    values = read_assignments(arguments.assignments)
    if arguments.random is None and arguments.space is not None:
        raise UserError(f"--space needs --random, the number of settings to draw, got --space {arguments.space} alone")
    space = None if arguments.space is None else search_spaces.load(arguments.space)
    _check_replayed(estimator_of(set(values)) if space is None else space.method)

    from analysis.trace_replay.traces import load_trace
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    trace, info = load_trace(layout.root, root=arguments.root), layout.read_info()
    of = trace.run
    searched = [text for text in of.get("workload_options", ()) if text not in info.workload_options]
    what = " ".join([of["workload"], *searched])
    print(f"{what}, {of['epochs']} epochs ({trace.total_steps} steps), seed {of['seed']}")
    if arguments.random is None:
        _print_one(layout, trace, values)
    else:
        space = space or search_spaces.load(info.space, info.space_files, info.grid)
        _check_replayed(space.method)
        _print_many(layout, trace, values, space, arguments)
    return 0


def _check_replayed(method: str | None) -> None:
    if method is not None and estimator_in(method):
        raise UserError(
            f"replay predicts Gradient-Skip alone, got settings of {method}: what an estimator costs is known from "
            "trials alone, so search it"
        )


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


# --- one setting ----------------------------------------------------------------------------------------------------


def _print_one(layout: Layout, trace: RunTrace, values: Mapping[str, Any]) -> None:
    import analysis

    hold = layout.read_info().hold
    given = {**{name: value for name, value in hold.items() if not os.environ.get(name, "").strip()}, **values}
    settings = Settings.from_environment(**{name: value for name, value in given.items() if name in BY_NAME})
    config = trace.config_of({**given, **{v.name: getattr(settings, v.field) for v in VARIABLES}})
    trace = _completed(layout, trace, config)
    found = {str(k): v for k, v in analysis.replay(trace, config).iloc[0].items()}
    trained_as = []
    if found["exact"]:
        trials = analysis.load(layout.root)
        trained_as = trials.loc[
            (trials["stage"] == found["stage"]) & (trials["status"] == "completed"), "trial"
        ].tolist()
    print("  ".join(f"{k}={v}" for k, v in settings.to_environment().items()))
    print("\n".join(prediction_lines(found, trace, trained_as, settings)))


def prediction_lines(
    found: Mapping[str, Any], trace: RunTrace, trained_as: Sequence[int], settings: Settings
) -> list[str]:
    """Return a prediction in words: its stops, or why there are none, what is saved, and which part is exact.

    Args:
        found: a row of `analysis.replay`.
        trace: what it was predicted from.
        trained_as: numbers of the study's trials that end in the predicted stage.
        settings: of the rule that decides the stops.
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


# --- many settings --------------------------------------------------------------------------------------------------


def _print_many(
    layout: Layout, trace: RunTrace, values: Mapping[str, Any], space: Space, arguments: argparse.Namespace
) -> None:
    import pandas as pd

    import analysis
    from analysis.formatting import percent, plural
    from tune_cac.tuning.baseline import (
        DrawnTrial,
        typical_configs,
        under_one_set_of_options,
        with_learned_ranges,
    )
    from tune_cac.tuning.run_context import run_context

    base = trace.config_of({"method": "none"})
    context = run_context(base)
    hold = {**with_watch(layout.read_info().hold, context), **values}
    typical = typical_configs(space, context, base, hold)
    trace = _completed(layout, trace, typical)
    context = with_learned_ranges(context, trace, typical)
    rng = random.Random(arguments.seed)
    drawn = [
        {**under_one_set_of_options(space.suggest(DrawnTrial(rng), context)), "method": space.method, **hold}
        for _ in range(arguments.random)
    ]
    frame = pd.DataFrame(drawn, dtype=object)
    trace = _completed(layout, trace, frame)
    found = analysis.replay(trace, frame)
    cells = outcomes_table(found, drawn)
    shown = cells[: 1 + arguments.top]
    saved = found["compute_saved"]
    held = f", {shown_hold(hold)} fixed" if hold else ""
    print(f"{plural(len(found), 'random setting')} of {space.name}{held}, seed {arguments.seed}")
    parts = [
        plural(len(cells) - 1, "distinct outcome"),
        f"{((found['stops'] == 0) & saved.notna()).sum()} stop nothing",
        f"{saved.isna().sum()} cannot be predicted, for lack of recorded signals" if saved.isna().any() else "",
        f"at most {percent(saved.max())} of the compute saved" if saved.notna().any() else "",
    ]
    more = f", {plural(len(cells) - len(shown), 'more outcome')} not shown (--top)" if len(shown) < len(cells) else ""
    print(f"{'; '.join(filter(None, parts))}{more}\n")
    print_table(shown)


def outcomes_table(found: pd.DataFrame, settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a header and one row for each distinct predicted outcome, the most frequent first.

    Args:
        found: result of `analysis.replay`.
        settings: the settings behind its rows, in order.
    """
    from analysis.formatting import percent, value_text
    from tune_cac.tuning.baseline import outcome_identity

    quality: Quality = found.attrs.get("quality", ACCURACY)
    groups: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    row: Any
    for row, values in zip(found.to_dict("records"), settings, strict=True):
        if row["compute_saved"] == row["compute_saved"]:
            groups.setdefault(outcome_identity(row, values), []).append((row, values))
    cells = [["settings", "saved", "braking", "exact", quality.name, "stops at iteration, through"]]
    for alike in sorted(groups.values(), key=lambda those: (-len(those), -those[0][0]["compute_saved"])):
        row, values = alike[0]
        stops = [f"{event['iteration']} {event['name']}" for event in json.loads(row["stop_events"])]
        cells.append(
            [
                str(len(alike)),
                percent(row["compute_saved"]),
                "" if not stops else str(values.get("CAC_BRAKING_DISTANCE") or 0),
                "trained" if row["exact"] else f"to {row['exact_until']}",
                value_text(row[quality.name], quality) if row["exact"] else "",
                ", ".join(stops) or "nothing",
            ]
        )
    return cells
