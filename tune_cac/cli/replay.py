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
from trainables.config import check_integer
from trainables.errors import UserError, cannot_write
from trainables.gradients.fields import estimator_in, estimator_of
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, VARIABLES
from trainables.quality import ACCURACY, Quality
from tune_cac.cli.options import add_assignments, add_study
from tune_cac.study.fixed_params import read_assignments, shown_hold, with_watch

if TYPE_CHECKING:
    import pandas as pd

    from analysis.io.layout import Layout
    from analysis.trace_replay.traces import RunTrace


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "replay", parents=[debug], help="predict what settings stop and save, from a study's recorded training",
        description="Predict what settings stop and save on a study's run without training: exact as far as trials "
        "were trained so, an estimate from the run without a method after it. CAC_* variables of the environment "
        "count; --set wins. With --random, the distinct outcomes of random settings of a space.",
    )  # fmt: skip
    add_assignments(parser)
    parser.add_argument("--random", type=int, metavar="N", help="replay so many random settings of a space")
    parser.add_argument("--space", help="that space (default: the study's)")
    parser.add_argument("--seed", type=int, default=0, help="of the random settings (default: 0)")
    parser.add_argument("--top", type=int, default=20, help="outcomes to show, the most frequent (default: 20)")
    parser.add_argument("--root", help="id of the recorded run, or how it begins, where the study has several")
    add_study(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction for one setting, or the outcomes of random settings of a space."""
    values = read_assignments(arguments.assignments)
    if arguments.random is None and arguments.space is not None:
        raise UserError(f"--space needs --random, the number of settings to draw, got --space {arguments.space} alone")
    for name, low in (("random", 1), ("seed", 0), ("top", 1)):
        if getattr(arguments, name) is not None:
            check_integer(f"--{name}", getattr(arguments, name), low)
    space = None if arguments.space is None else search_spaces.load(arguments.space)
    _check_replayed(estimator_of(set(values)) if space is None else space.method)

    from analysis.trace_replay.traces import load_trace
    from tune_cac.study.folder import find_study

    layout = find_study(arguments.results, arguments.study)
    trace = load_trace(layout.root, root=arguments.root)
    of = trace.run
    given = layout.read_info().workload_options
    searched = "".join(f" {option}" for option in of.get("workload_options", ()) if option not in given)
    print(f"{of['workload']}{searched}, {of['epochs']} epochs ({trace.total_steps} steps), seed {of['seed']}")
    if arguments.random is None:
        _one(layout, trace, values)
    else:
        info = layout.read_info()
        space = space or search_spaces.load(info.space, info.space_files, info.grid)
        _check_replayed(space.method)
        _many(layout, trace, values, space, arguments)
    return 0


def _check_replayed(method: str | None) -> None:
    if method is not None and estimator_in(method):
        raise UserError(
            f"replay predicts Gradient-Skip alone, got settings of {method}: what an estimator costs is known from "
            "trials alone, so search it"
        )


def completed(layout: Layout, trace: RunTrace, settings: Any) -> RunTrace:
    """Return the trace with what the settings need (`tuning.baseline.completed`); UserError on write errors."""
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


def _one(layout: Layout, trace: RunTrace, values: Mapping[str, Any]) -> None:
    import analysis

    hold = layout.read_info().hold
    given = {**{name: value for name, value in hold.items() if not os.environ.get(name, "").strip()}, **values}
    settings = Settings.from_environment(**{name: value for name, value in given.items() if name in BY_NAME})
    config = trace.config_of({**given, **{v.name: getattr(settings, v.field) for v in VARIABLES}})
    trace = completed(layout, trace, config)
    found = {str(k): v for k, v in analysis.replay(trace, config).iloc[0].items()}
    print("  ".join(f"{k}={v}" for k, v in settings.to_environment().items()))
    print("\n".join(said_of(found, trace, _trained_as(layout, found), settings)))


def said_of(found: Mapping[str, Any], trace: RunTrace, trained_as: Sequence[int], settings: Settings) -> list[str]:
    """Return a prediction in words: its stops, or why there are none, what is saved, and which part is exact.

    Args:
        found: a row of `analysis.replay`.
        trace: what it was predicted from.
        trained_as: numbers of the study's trials that end in the predicted stage.
        settings: of the rule that decides the stops.
    """
    from analysis.formatting import percent
    from trainables.gradskip.advice.why_nothing import why_nothing_stopped
    from trainables.gradskip.variables import ratio_name

    lines, mode = [], settings.mode
    for event in json.loads(found["stop_events"]):
        ratio = "" if event["ratio"] is None else f" at {ratio_name(event['rule'])} {event['ratio']:.4f}"
        estimated = "" if event["iteration"] < found["exact_until"] else " (estimate)"
        lines.append(
            f"iteration {event['iteration']}: stops through {event['layer']} ({event['name']}), {event['rule']}{ratio}"
            f"{estimated}"
        )
    if found["compute_saved"] == found["compute_saved"]:
        if not lines:
            lines.append(f"stops nothing: {why_nothing_stopped(settings, trace.total_steps)}")
        lines.append(f"compute saved {percent(found['compute_saved'])} (backward {percent(found['backward_saved'])})")
    return [*lines, _certainty(found, trace, trained_as, mode)]


def _certainty(found: Mapping[str, Any], trace: RunTrace, trained_as: Sequence[int], mode: str) -> str:
    from analysis.formatting import value_text

    until = found["exact_until"]
    if found["compute_saved"] != found["compute_saved"]:
        return (
            f"exact up to iteration {until}, not predicted after it: what {mode} looks at is recorded only where a "
            "trial with the same timings has run it"
        )
    if found["exact"]:
        trials = f" as trial {' and '.join(map(str, trained_as))}" if trained_as else ""
        quality = trace.quality
        return f"exact: trained before{trials}, {quality.name} {value_text(found[quality.name], quality)}"
    if until >= trace.total_steps:
        return (
            f"exact in stops and savings; this run was not trained to its end, so its {trace.quality.name} is not known"
        )
    source = "the dense run" if found["stage"] == trace.dense.id else "the nearest recorded run"
    return f"exact up to iteration {until}, estimated from {source} after it"


def _trained_as(layout: Layout, found: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the trials that end in a prediction's stage."""
    if not found["exact"]:
        return []
    import analysis

    trials = analysis.load(layout.root)
    those = trials[(trials["stage"] == found["stage"]) & (trials["status"] == "completed")]
    return [int(number) for number in those["trial"]]


# --- many settings --------------------------------------------------------------------------------------------------


def _many(
    layout: Layout, trace: RunTrace, values: Mapping[str, Any], space: Space, arguments: argparse.Namespace
) -> None:
    import pandas as pd

    import analysis
    from analysis.formatting import percent, plural
    from tune_cac.cli.console import print_table
    from tune_cac.tuning.baseline import (
        DrawnTrial,
        typical_configs,
        under_one_set_of_options,
        with_learned_ranges,
    )
    from tune_cac.tuning.run_context import run_context

    info = layout.read_info()
    base = trace.config_of({"method": "none"})
    context = run_context(base)
    hold = {**with_watch(info.hold, context), **values}
    typical = typical_configs(space, context, base, hold)
    trace = completed(layout, trace, typical)
    context = with_learned_ranges(context, trace, typical)
    rng = random.Random(arguments.seed)
    drawn = [
        {**under_one_set_of_options(space.suggest(DrawnTrial(rng), context)), "method": space.method, **hold}
        for _ in range(arguments.random)
    ]
    frame = pd.DataFrame(drawn, dtype=object)
    trace = completed(layout, trace, frame)
    found = analysis.replay(trace, frame)
    held = f", {shown_hold(hold)} fixed" if hold else ""
    print(f"{plural(len(found), 'random setting')} of {space.name}{held}, seed {arguments.seed}")
    nothing = (found["stops"] == 0) & found["compute_saved"].notna()
    open_ones = int(found["compute_saved"].isna().sum())
    cells = outcomes_table(found, drawn)
    shown = cells[: 1 + arguments.top]
    more = f", {plural(len(cells) - len(shown), 'more outcome')} not shown (--top)" if len(shown) < len(cells) else ""
    saved = found["compute_saved"].max()
    print(
        f"{plural(len(cells) - 1, 'distinct outcome')}; {int(nothing.sum())} stop nothing"
        + (f"; {open_ones} cannot be predicted, for lack of recorded signals" if open_ones else "")
        + (f"; at most {percent(saved)} of the compute saved" if saved == saved else "")
        + more
        + "\n"
    )
    print_table(shown)


def outcomes_table(found: pd.DataFrame, settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a header and one row for each distinct predicted outcome, the most frequent first.

    Args:
        found: result of `analysis.replay`.
        settings: the settings behind its rows, in order.
    """
    from analysis.formatting import percent, value_text
    from tune_cac.tuning.baseline import outcome

    quality: Quality = found.attrs.get("quality", ACCURACY)
    groups: dict[str, list[int]] = {}
    records: list[dict[str, Any]] = [{str(k): v for k, v in row.items()} for row in found.to_dict("records")]
    for place, (row, values) in enumerate(zip(records, settings, strict=True)):
        if row["compute_saved"] == row["compute_saved"]:
            groups.setdefault(outcome(row, values), []).append(place)
    rows = []
    for places in sorted(groups.values(), key=lambda those: (-len(those), -records[those[0]]["compute_saved"])):
        row, values = records[places[0]], settings[places[0]]
        stops = [f"{event['iteration']} {event['name']}" for event in json.loads(row["stop_events"])]
        rows.append(
            [
                str(len(places)),
                percent(row["compute_saved"]),
                "" if not stops else str(values.get("CAC_BRAKING_DISTANCE") or 0),
                "trained" if row["exact"] else f"to {row['exact_until']}",
                value_text(row[quality.name], quality) if row["exact"] else "",
                ", ".join(stops) or "nothing",
            ]
        )
    header = ["settings", "saved", "braking", "exact", quality.name, "stops at iteration, through"]
    return [header, *rows]
