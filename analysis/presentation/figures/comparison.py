"""The Pareto fronts of compared studies as one plot."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import drop_text, drop_unit, drop_words, metric_words, percent, plotted
from analysis.presentation.figures.figure import Figure, axis, limit, marks, note
from analysis.presentation.study_comparison import Comparison
from trainables.savings import SAVED, saved_words

#: Colours by role, dashes and symbols that differ, too, of the first studies; later ones begin again.
_COLOURS = ("@front", "@control", "@chosen", "@published", "@text")
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle", "square", "diamond", "star", "triangle-down", "x")


def fronts(comparison: Comparison) -> Figure:
    """Return the plot of change in the metric against saving: each study's trials, its front as steps.

    Upwards is better. Trials that lose at least as much of it as the reference are not drawn.
    """
    quality, candidates = comparison.quality, comparison.candidates
    shown = candidates[candidates[quality.drop] < comparison.reference_drop]
    points = pd.DataFrame({
        "study": shown["study"], "on_front": shown["on_own_front"], "x": 100 * shown[SAVED],
        "y": plotted(-shown[quality.drop], quality),
    })  # fmt: skip
    points["label"] = [
        f"{study}, trial {trial}\nsaved {percent(saved)}, {drop_words(quality)} {drop_text(drop, quality)}"
        for study, trial, saved, drop in zip(*(shown[c] for c in ("study", "trial", SAVED, quality.drop)), strict=True)
    ]
    allowed = float(plotted(-comparison.allowed, quality))
    gains = [0.0, allowed, *points["y"]]
    margin = 0.08 * (max(gains) - min(gains)) or 1.0
    bottom = min(gains) - margin
    traces = []
    for place, name in enumerate(comparison.studies["study"]):
        own, colour = points[points["study"] == name], _COLOURS[place % len(_COLOURS)]
        symbol = _SYMBOLS[place % len(_SYMBOLS)]
        traces.append(marks(str(name), own, symbol, colour, size=6, opacity=0.4, showlegend=False))
        front = own[own["on_front"]].sort_values("x", kind="stable")
        if len(front):  # at each saving: the best value among trials that save at least as much
            ends = [{"x": 0.0, "y": front["y"].iloc[0]}, {"x": front["x"].iloc[-1], "y": bottom}]
            front = pd.concat([pd.DataFrame([ends[0]]), front, pd.DataFrame([ends[1]])]).fillna({"label": str(name)})
        style = {"color": colour, "width": 2, "shape": "vh", "dash": _DASHES[place % len(_DASHES)]}
        sizes = [0, *[9] * (len(front) - 2), 0] if len(front) else []
        traces.append(marks(str(name), front, symbol, colour, size=sizes, mode="lines+markers", line=style))
    baseline = pd.DataFrame({"x": [0.0], "y": [0.0], "label": ["baseline"]})
    traces.append(marks("baseline", baseline, "square", "@text"))
    better = "" if quality.direction == "max" else ", upwards lower"
    saving = saved_words(comparison.saving)
    return Figure(
        name="fronts", height=480, traces=traces,
        alt=f"Pareto fronts of {len(comparison.studies)} studies, {saving} against change in {metric_words(quality)}.",
        layout={
            "xaxis": axis(f"{saving} (%)", rangemode="tozero"),
            "yaxis": axis(
                f"change in {metric_words(quality)}{drop_unit(quality)}{better}", range=[bottom, max(gains) + margin]
            ),
            "shapes": [limit(allowed)],
            "annotations": [note(f"allowed {drop_words(quality)}", x=1, y=allowed)],
        },
    )  # fmt: skip
