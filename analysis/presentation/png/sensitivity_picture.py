"""A sensitivity analysis as a picture with one line per layer, drawn with matplotlib's objects and no global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analysis.presentation.figures.palette import LIGHT, depth_colour

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
    curves: Mapping[str, Sequence[tuple[float, float]]], *, allowed_drop: float, title: str, pruned: str = "elements"
) -> Figure:
    """Draw accuracy against the pruned share of one layer alone, one line per layer.

    Args:
        curves: by layer, in the model's order: (level, accuracy), fractions, level 0 first.
        allowed_drop: allowed accuracy loss, a fraction; drawn as a line below the first layer's accuracy at level 0.
        title: title of the picture.
        pruned: kind of what is pruned, for the axis label: elements, filters or channels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, -(-len(curves) // _ROWS))
    figure = Figure(figsize=(_SIZE_INCHES[0] + 2.2 * (columns - 1), _SIZE_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (name, points) in enumerate(curves.items()):
        axes.plot(
            [100 * level for level, _ in points], [100 * accuracy for _, accuracy in points],
            color=depth_colour(place / max(1, len(curves) - 1)), linestyle=_LINES[place % len(_LINES)],
            marker=_MARKERS[place % len(_MARKERS)], markersize=3.5, linewidth=1.3, label=f"layer {place}", gid=name,
        )  # fmt: skip
    first = next(iter(curves.values()), ())
    if first:
        axes.axhline(
            100 * (first[0][1] - allowed_drop), color=LIGHT["limit"], linewidth=1, linestyle=(0, (1, 2)),
            label=f"allowed accuracy loss ({100 * allowed_drop:g} points)",
        )  # fmt: skip
    axes.set_xlabel(f"{pruned} pruned of one layer (%)")
    axes.set_ylabel("accuracy (%)")
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
    curves: Mapping[str, Sequence[tuple[float, float]]], *, allowed_drop: float, title: str, pruned: str = "elements"
) -> bytes:
    """Return `sensitivity_figure` as the bytes of a PNG file; equal curves give equal bytes."""
    written = io.BytesIO()
    figure = sensitivity_figure(curves, allowed_drop=allowed_drop, title=title, pruned=pruned)
    figure.savefig(written, format="png", dpi=_DOTS_PER_INCH)
    return written.getvalue()
