"""A sensitivity analysis as a picture with one line per layer, drawn with matplotlib's objects and no global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analysis.presentation.figures.palette import LIGHT, depth_colour
from analysis.quality_words import axis_words, drop_text, drop_words, plotted
from trainables.quality import ACCURACY, Quality, allowed_amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Neighbouring layers have similar colours; line styles and markers distinguish them.
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_SIZE_INCHES = (8.4, 4.8)
_DOTS_PER_INCH = 200
#: Names in one column of the legend.
_ROWS = 22
#: Maximum characters of a name; of a longer name only the end is shown.
_MOST_CHARACTERS = 34


def sensitivity_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    allowed_drop: float | str,
    title: str,
    pruned: str = "elements",
    quality: Quality = ACCURACY,
) -> Figure:
    """Draw accuracy, or another metric, against the pruned share of one layer alone, one line per layer.

    Args:
        curves: by layer, in the model's order: (level, value), level 0 first.
        allowed_drop: allowed drop (`trainables.quality`); drawn as a line from the first layer's value at level 0.
        title: title of the picture.
        pruned: kind of what is pruned, for the axis label: elements, filters or channels.
        quality: the metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, -(-len(curves) // _ROWS))
    figure = Figure(figsize=(_SIZE_INCHES[0] + 2.2 * (columns - 1), _SIZE_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (name, points) in enumerate(curves.items()):
        axes.plot(
            [100 * level for level, _ in points], plotted([value for _, value in points], quality),
            color=depth_colour(place / max(1, len(curves) - 1)), linestyle=_LINES[place % len(_LINES)],
            marker=_MARKERS[place % len(_MARKERS)], markersize=3.5, linewidth=1.3, label=f"layer {place}", gid=name,
        )  # fmt: skip
    first = next(iter(curves.values()), ())
    if first:
        limit = float(allowed_amount(allowed_drop, first[0][1]))
        axes.axhline(
            float(plotted(first[0][1] - quality.sign * limit, quality)), color=LIGHT["limit"], linewidth=1,
            linestyle=(0, (1, 2)),
            label=f"allowed {drop_words(quality)} ({drop_text(limit, quality)})",
        )  # fmt: skip
    axes.set_xlabel(f"{pruned} pruned of one layer (%)")
    axes.set_ylabel(axis_words(quality).removeprefix("validation "))
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.set_xlim(0, None)
    axes.grid(color=LIGHT["rest"])
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(loc="outside right upper", ncols=columns, frameon=False, fontsize="small", handlelength=3)
    for text, name in zip(legend.get_texts(), curves, strict=False):
        # Set here because matplotlib omits labels that begin with an underscore.
        text.set(text=_shown(name), parse_math=False)
    return figure


def _shown(name: str) -> str:
    short = name.removesuffix(".weight")
    return short if len(short) <= _MOST_CHARACTERS else "..." + short[3 - _MOST_CHARACTERS :]


def sensitivity_picture(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    allowed_drop: float | str,
    title: str,
    pruned: str = "elements",
    quality: Quality = ACCURACY,
) -> bytes:
    """Return `sensitivity_figure` as the bytes of a PNG file; equal curves give equal bytes."""
    written = io.BytesIO()
    figure = sensitivity_figure(curves, allowed_drop=allowed_drop, title=title, pruned=pruned, quality=quality)
    figure.savefig(written, format="png", dpi=_DOTS_PER_INCH)
    return written.getvalue()
