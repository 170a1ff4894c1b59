"""The studies' Pareto fronts in one picture, drawn with matplotlib's objects and no global state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pandas as pd

from analysis.presentation.study_comparison import Comparison
from analysis.quality_words import drop_unit, drop_words, metric_words, plotted
from trainables.quality import Quality
from trainables.savings import SAVED, saved_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colour-blind-safe colours, darkest first; markers and line styles differ, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
_SIZE_INCHES = (7.0, 4.6)
_DOTS_PER_INCH = 200


def comparison_figure(comparison: Comparison) -> Figure:
    """Draw change in accuracy, or the studies' metric, against their saving: each study's trials, its front as steps.

    Upwards is better. Trials that lose at least as much of it as the reference are not drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    quality = comparison.quality
    drop = comparison.candidates[quality.drop]
    shown = comparison.candidates[drop < comparison.reference_drop]
    allowed = float(plotted(-comparison.allowed, quality))
    gains = [0.0, allowed, *plotted(-shown[quality.drop], quality)]
    margin = 0.08 * (max(gains) - min(gains)) or 1.0
    bottom = min(gains) - margin
    for place, name in enumerate(comparison.studies["study"]):
        _draw(axes, shown[shown["study"] == name], place, bottom, quality)
    axes.plot(0, 0, marker="*", markersize=13, color="black", linestyle="none", label="baseline", clip_on=False)
    axes.axhline(allowed, color="0.35", linewidth=1, linestyle=(0, (1, 2)), label=f"allowed {drop_words(quality)}")
    axes.set_ylim(bottom, max(gains) + margin)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{saved_words(comparison.saving)} (%)")
    better = "" if quality.direction == "max" else ", upwards lower"
    axes.set_ylabel(f"change in {metric_words(quality)}{drop_unit(quality)}{better}")
    axes.set_title(f"{comparison.workload}, {comparison.length}: Pareto fronts", fontsize="medium")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    for text, name in zip(legend.get_texts(), comparison.studies["study"], strict=False):
        # Set here because matplotlib omits labels that begin with an underscore.
        text.set(text=str(name), parse_math=False)
    return figure


def _draw(axes: Axes, own: pd.DataFrame, place: int, bottom: float, quality: Quality) -> None:
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    axes.plot(
        100 * own[SAVED], plotted(-own[quality.drop], quality), linestyle="none", marker=marker, color=colour,
        markersize=3.5, alpha=0.35,
    )  # fmt: skip
    front = own[own["on_own_front"]].sort_values(SAVED, kind="stable")
    saved, gain = list(100 * front[SAVED]), list(plotted(-front[quality.drop], quality))
    if saved:  # at each saving: the best value among trials that save at least as much
        saved, gain = [0.0, *saved, saved[-1]], [gain[0], *gain, bottom]
    axes.step(
        saved, gain, where="pre", color=colour, linewidth=1.8, linestyle=_LINES[place % len(_LINES)], marker=marker,
        markersize=5, markevery=slice(1, len(saved) - 1) if saved else None, label=f"study {place}",
    )  # fmt: skip


def comparison_picture(comparison: Comparison, format: str) -> bytes:
    """Return `comparison_figure` as the bytes of a ``svg`` or ``png`` file; equal comparisons give equal bytes."""
    import matplotlib

    figure = comparison_figure(comparison)
    written = io.BytesIO()
    # Text is kept as text; the fixed salt makes the ids of the SVG elements reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tune_cac"}):
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(written, format=format, dpi=_DOTS_PER_INCH, metadata=metadata)
    return written.getvalue()
