"""The stage tree as one plot: a bar a stage over the iterations that it covers, joined to its parent's bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.formatting import percent, plural, value_text
from analysis.presentation.figures.figure import Axis, Bars, Figure, Points, names_axis, short
from analysis.presentation.stage_frame import most_visited
from trainables.quality import ACCURACY, Quality
from trainables.savings import TRAINING, saved_words

#: Most stages in the plot, those with the most trials; further ones are counted in its caption.
MOST_LANES = 60


def stage_tree(frame: pd.DataFrame | None) -> Figure | None:
    """Return the plot of a study's stages (`analysis.stage_frame`); None if no trial went through any."""
    if frame is None or not frame["trials"].map(len).any():
        return None
    rows = _lanes(frame[frame["stage"].isin(most_visited(frame, MOST_LANES))])
    quality: Quality = frame.attrs.get("quality", ACCURACY)
    saving = saved_words(frame.attrs.get("saving", TRAINING))
    lane = {row["stage"]: place for place, row in enumerate(rows)}
    most_saved = max((row["saved"] for row in rows if row["saved"] > 0), default=1.0)
    colours = ["@rest" if pd.isna(row["saved"]) else f"@depth:{row['saved'] / most_saved:.3f}" for row in rows]
    stages = Bars(
        rows=list(lane.values()), begins=[row["begin"] for row in rows], colours=colours,
        lengths=[max(row["known_until"] - row["begin"], 1) for row in rows],
        labels=[_label(row, saving, quality) for row in rows],
    )  # fmt: skip
    children = [row for row in rows if row["depth"] > 0]
    gap = float("nan")
    joints = Points(
        x=[x for row in children for x in (row["begin"], row["begin"], gap)],
        y=[y for row in children for y in (lane[row["parent"]], lane[row["stage"]], gap)],
        colour="@faint", line_width=1,
    )  # fmt: skip
    saved = [(step, lane[row["stage"]]) for row in rows for step in row["checkpoint_steps"]]
    checkpoints = Points(
        name="checkpoint", x=[step for step, _ in saved], y=[place + 0.42 for _, place in saved], symbol="|", size=4,
        colour="@text",
    )  # fmt: skip
    trials = len({trial for trials in frame["trials"] for trial in trials})
    notes = [f"One bar a stretch of training. Colour: {saving} by the run that ends in it; grey: none was trained to "
             "the end."]  # fmt: skip
    if hidden := len(frame) - len(rows):
        notes.append(f"{plural(hidden, 'more stage')} not shown.")
    return Figure(
        name="tree",
        alt=f"Stage tree of {plural(trials, 'trial')}: {plural(len(frame), 'stage')}, shared ones drawn once.",
        traces=[stages, joints, *([checkpoints] if saved else [])],
        x=Axis(title="iteration", range=(0, frame.attrs["total_steps"])),
        y=names_axis([short(_words(row)) for row in rows]),
        height=120 + 20 * max(3, len(rows)),
        notes=notes,
    )


def _lanes(frame: pd.DataFrame) -> list[Mapping[Any, Any]]:
    """Return the rows from top to bottom: each stage above its children, the latest first: no joint crosses a bar."""
    children: dict[Any, list[Mapping[Any, Any]]] = {}
    for row in frame.fillna({"begin": 0}).to_dict("records"):
        children.setdefault(row["parent"] if row["depth"] > 0 else None, []).append(row)
    found: list[Mapping[Any, Any]] = []
    waiting = children.pop(None, [])
    while waiting:
        found.append(waiting.pop())
        waiting += sorted(children.get(found[-1]["stage"], ()), key=lambda row: (row["begin"], len(row["trials"])))
    return found


def _words(row: Mapping[Any, Any]) -> str:
    return f"{row['begin']}: {row['action']}" if row["depth"] > 0 else f"{row['action']} {row['root'][:8]}"


def _label(row: Mapping[Any, Any], saving: str, quality: Quality) -> str:
    parts = [f"{_words(row)}, to {row['known_until']}", plural(len(row["trials"]), "trial")]
    parts += [] if pd.isna(row["saved"]) else [f"{saving} {percent(row['saved'])}"]
    parts += [] if pd.isna(row[quality.name]) else [f"{quality.name} {value_text(row[quality.name], quality)}"]
    return "\n".join([*parts, plural(row["checkpoints"], "checkpoint")])
