"""The report's plots as PNG for papers: `Figure` objects drawn with matplotlib's objects and no global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.palette import DEPTH_LIGHT, LIGHT, depth_colour
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.report_figures import report_figures
from trainables.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Dots per inch of the files, as journals require for halftones.
DPI = 300
#: Width in inches, twice that of a column in a two-column paper.
_WIDTH = 6.4
#: Pixels of a figure's height per inch.
_PIXELS_PER_INCH = 100
#: Points per pixel of a line or a mark; lines and marks on paper are thinner than on a screen.
_POINTS_PER_PIXEL = 0.65
#: Characters of a legend in one line.
_LEGEND_CHARACTERS = 92
_SYMBOLS = {
    "circle": "o", "circle-open": "o", "square": "s", "diamond": "D", "star": "*", "triangle-down": "v", "x": "x",
}  # fmt: skip
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_STEPS = {"linear": "default", "hv": "steps-post", "vh": "steps-pre"}


def write_pngs(data: ReportData, folder: Path) -> list[Path]:
    """Write a PNG of each plot that has data.

    Args:
        data: data of the report.
        folder: target folder; created if missing. Files of the same names are replaced.

    Returns:
        The files, ``pareto.png`` first.

    Raises:
        UserError: if matplotlib is not installed or the folder cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UserError("PNG of the plots needs matplotlib, which is not installed: pip install matplotlib") from None
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in report_figures(data).items():
            size = (_WIDTH, figure.height / _PIXELS_PER_INCH)
            canvas = Canvas(figsize=size, dpi=DPI, layout="constrained", facecolor=LIGHT["ground"])
            FigureCanvasAgg(canvas)
            _draw(canvas.add_subplot(), figure)
            written.append(folder / f"{name}.png")
            canvas.savefig(written[-1])
    except OSError as error:
        raise UserError(f"the plots cannot be written to {folder}: {error}; give another folder") from None
    return written


def _draw(axes: Axes, figure: Figure) -> None:
    """Draw a figure's traces and those settings of its layout that the report's plots use."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["faint"])
    axes.tick_params(colors=LIGHT["text"], labelsize=8)
    axes.grid(color=LIGHT["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    bars = [trace for trace in figure.traces if trace["type"] == "bar"]
    grouped = figure.layout.get("barmode") == "group"
    for trace in figure.traces:
        if trace["type"] == "bar":
            _bars(axes, trace, place=bars.index(trace) if grouped else 0, count=len(bars) if grouped else 1)
        elif trace.get("marker", {}).get("showscale"):
            _colour_scale(axes, trace["marker"])
        else:
            _scatter(axes, trace)
    for shape in figure.layout.get("shapes", ()):
        axes.axhline(shape["y0"], color=LIGHT["limit"], linewidth=0.8, linestyle=(0, (4, 3)))
    for note in figure.layout.get("annotations", ()):
        axes.annotate(
            _text(note["text"]), (note["x"], note["y"]), xycoords=("axes fraction", "data"), ha=note["xanchor"],
            xytext=(-2 if note["xanchor"] == "right" else 2, 2), textcoords="offset points", fontsize=7,
            color=LIGHT["faint"],
        )  # fmt: skip
    _set_axis(axes, "x", figure.layout["xaxis"])
    _set_axis(axes, "y", figure.layout["yaxis"])
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(4, _LEGEND_CHARACTERS // (max(map(len, labels)) + 5)))
        axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def _scatter(axes: Axes, trace: dict[str, Any]) -> None:
    marker, line, error = trace.get("marker", {}), trace.get("line", {}), trace.get("error_x")
    label = _text(trace["name"]) if trace.get("showlegend", True) else None
    colour = _colour(line.get("color") or marker["color"])
    look: dict[str, Any] = {"color": colour, "label": label}  # opaque: faint lines do not print
    if "markers" in trace["mode"]:
        look["marker"] = _SYMBOLS[marker.get("symbol", "circle")]
        if str(marker.get("symbol")).endswith("-open"):
            look["facecolors" if isinstance(marker["size"], list) else "markerfacecolor"] = LIGHT["ground"]
        if isinstance(marker["size"], list):  # of marks alone, without lines
            areas = [(_POINTS_PER_PIXEL * size) ** 2 for size in marker["size"]]
            axes.scatter(trace["x"], trace["y"], s=areas, linewidths=0, **look)
            return
        look["markersize"] = _POINTS_PER_PIXEL * marker["size"]
    if error is not None:
        spread = [error["arrayminus"], error["array"]]
        axes.errorbar(trace["x"], trace["y"], xerr=spread, fmt="none", ecolor=colour, capsize=3)
    look["linestyle"] = _DASHES[line.get("dash", "solid")] if "lines" in trace["mode"] else "none"
    look["drawstyle"] = _STEPS[line.get("shape", "linear")]
    axes.plot(trace["x"], trace["y"], linewidth=_POINTS_PER_PIXEL * line.get("width", 1), **look)


def _bars(axes: Axes, trace: dict[str, Any], *, place: int, count: int) -> None:
    """Draw horizontal bars, the given place of a group of so many."""
    colour, height = trace["marker"]["color"], 0.75 / count
    axes.barh(
        [y + (place - (count - 1) / 2) * height for y in trace["y"]], trace["x"], left=trace.get("base"),
        height=height, color=[_colour(c) for c in colour] if isinstance(colour, list) else _colour(colour),
        edgecolor=LIGHT["ground"], linewidth=0.4, label=_text(trace["name"]) if "name" in trace else None,
    )  # fmt: skip


def _colour_scale(axes: Axes, marker: dict[str, Any]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    scale = LinearSegmentedColormap.from_list("depth", list(DEPTH_LIGHT))
    bar = axes.figure.colorbar(
        ScalarMappable(Normalize(marker["cmin"], marker["cmax"]), scale), ax=axes, location="top", aspect=50,
        shrink=0.6, pad=0.02,
    )  # fmt: skip
    bar.set_label(marker["colorbar"]["title"]["text"], fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _set_axis(axes: Axes, which: Literal["x", "y"], axis: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    axes.set(**{f"{which}label": _text(axis["title"]["text"])})
    side = axes.xaxis if which == "x" else axes.yaxis
    side.label.set(fontsize=9, color=LIGHT["text"])
    if not axis.get("showgrid", True):
        axes.grid(visible=False, axis=which)
    if axis.get("type") == "log":  # its range is one of powers of ten
        axes.set(**{f"{which}scale": "log"})
        side.set_ticks([], minor=True)
        axis = {**axis, "range": [10**end for end in axis["range"]]}
    if "tickvals" in axis:
        names = [_text(name) for name in axis["ticktext"]]
        side.set_ticks(axis["tickvals"], names, fontsize=8 if len(names) <= 12 else 6)
        axes.set(**{f"{which}lim": axis.get("range", (len(names) - 0.5, -0.5))})
        return
    side.set_major_locator(MultipleLocator(axis["dtick"]) if "dtick" in axis else MaxNLocator(9, steps=[1, 2, 5, 10]))
    if "range" in axis:
        axes.set(**{f"{which}lim": axis["range"]})
    elif axis.get("rangemode") == "tozero":
        axes.set(**{f"{which}lim": (0, None)})


def _colour(name: str) -> str:
    """Return the colour of the light scheme that a figure names."""
    return depth_colour(float(name.removeprefix("@depth:"))) if name.startswith("@depth:") else LIGHT[name[1:]]


def _text(words: str) -> str:
    """Escape text for matplotlib, where a dollar sign begins math text."""
    return words.replace("$", r"\$")
