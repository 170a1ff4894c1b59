"""The page's plots as PNG for papers, drawn with matplotlib's object interface and no global state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.presentation.figures.course import accuracy_range, convergence, cost, learning_curves
from analysis.presentation.figures.outcomes import Bars, confirmation, importance, interactions, pareto
from analysis.presentation.figures.palette import DEPTH_LIGHT, LIGHT, depth_colour
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.stops import near_thresholds, timeline, variance
from trainables.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Dots per inch of the files, as journals require for halftones.
DPI = 300
#: Width and height in inches; the width is twice that of a column in a two-column paper.
_SIZE = (6.4, 4.2)
#: Maximum number of layers in a legend.
_MOST_NAMED = 8


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
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("PNG of the plots needs matplotlib, which is not installed: pip install matplotlib") from None
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (draw, height) in _drawings(data).items():
            figure = Figure(figsize=(_SIZE[0], height), dpi=DPI, layout="constrained", facecolor=LIGHT["ground"])
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            _plain_axes(axes)
            draw(axes)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1])
    except OSError as error:
        raise UserError(f"the plots cannot be written to {folder}: {error}; give another folder") from None
    return written


def _drawings(data: ReportData) -> dict[str, tuple[Callable[[Axes], None], float]]:
    """Return the draw function and the height in inches of each plot that has data, by name."""
    drawings: dict[str, tuple[Callable[[Axes], None], float]] = {}

    def add(name: str, draw: Callable[[Axes, Any], None], found: Any, height: float = _SIZE[1]) -> None:
        if found:
            drawings[name] = (lambda axes: draw(axes, found), height)

    add("pareto", _pareto, pareto(data))
    forest = confirmation(data)
    add("confirmation", _confirmation, forest, 1.4 + 0.32 * len(forest.candidates) if forest else 0)
    stops = timeline(data)
    add("timeline", _timeline, stops, 1.5 + 0.2 * len(stops.rows) if stops else 0)
    add("variance", _variance, variance(data))
    add("learning", _learning, learning_curves(data))
    for name, found, axis in (
        ("importance", importance(data), "importance (share)"),
        ("interactions", interactions(data), "interaction (strength)"),
    ):
        rows = len({n for bars in found for n in bars.names})
        add(name, lambda axes, bars, axis=axis: _bars(axes, bars, axis), found, 1.3 + 0.34 * rows)  # type: ignore[misc]
    course = convergence(data)
    add("convergence", _convergence, course)
    if course is not None and course.hypervolume:
        add("hypervolume", _hypervolume, course)
    add("cost", _cost, cost(data))
    return drawings


def _plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["faint"])
    axes.tick_params(colors=LIGHT["text"], labelsize=8)
    axes.grid(color=LIGHT["line"], linewidth=0.6)
    axes.set_axisbelow(True)


def _titles(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(_text(x), fontsize=9, color=LIGHT["text"])
    axes.set_ylabel(_text(y), fontsize=9, color=LIGHT["text"])


def _trials(axes: Axes, y: str) -> None:
    """Label the axes of a plot over trials; the horizontal axis has integer ticks only."""
    axes.locator_params(axis="x", integer=True)
    _titles(axes, "trial", y)


def _text(words: str) -> str:
    """Escape text for matplotlib, where a dollar sign begins math text."""
    return words.replace("$", r"\$")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def _pareto(axes: Axes, found: Any) -> None:
    sizes = [min(60.0, 12 + 8 * n**0.5) for n in found.trials.counts]
    axes.scatter(found.trials.x, found.trials.y, s=sizes, color=LIGHT["trial"], alpha=0.7, linewidths=0, label="trials")
    axes.plot(found.front.x, found.front.y, "o-", color=LIGHT["front"], markersize=4, linewidth=1.4,
              drawstyle="steps-pre", label="Pareto front")  # fmt: skip
    if len(found.shorter):
        axes.plot(found.shorter.x, found.shorter.y, "v--", color=LIGHT["control"], markersize=5, linewidth=1.4,
                  label="cut dense runs")  # fmt: skip
    for name, group, marker, colour, size in (
        ("random stops", found.random_stops, "x", "control", 28),
        ("published defaults", found.published, "D", "published", 34),
        ("baseline", found.baseline, "s", "text", 34),
        ("chosen", found.chosen, "*", "chosen", 130),
    ):
        if len(group):
            axes.scatter(group.x, group.y, marker=marker, s=size, color=LIGHT[colour], label=name, zorder=3)
    if found.least_accuracy is not None:
        axes.axhline(found.least_accuracy, color=LIGHT["limit"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate("allowed accuracy loss", (0, found.least_accuracy), xycoords=("axes fraction", "data"),
                      fontsize=7, xytext=(2, 2), textcoords="offset points", color=LIGHT["faint"])  # fmt: skip
    axes.set_ylim(*found.y_range)
    _titles(axes, f"{found.saved} (%)", "validation accuracy (%)")
    _legend(axes)


def _confirmation(axes: Axes, found: Any) -> None:
    for name, wanted, colour, fill in (
        ("confirmed", True, "chosen", LIGHT["chosen"]), ("not confirmed", False, "control", "white"),
    ):  # fmt: skip
        those = [i for i, confirmed in enumerate(found.confirmed) if confirmed == wanted]
        if those:
            axes.errorbar(
                [found.drop[i] for i in those], those,
                xerr=[[found.drop[i] - found.low[i] for i in those], [found.high[i] - found.drop[i] for i in those]],
                fmt="o", color=LIGHT[colour], markerfacecolor=fill, capsize=3, label=name,
            )  # fmt: skip
    axes.axvline(
        found.allowed, color=LIGHT["limit"], linewidth=0.8, linestyle=(0, (4, 3)), label="allowed accuracy loss"
    )
    axes.set_yticks(range(len(found.candidates)), [_text(name) for name in found.candidates])
    axes.set_ylim(len(found.candidates) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _titles(axes, "loss of test accuracy (points)", "")
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _timeline(axes: Axes, found: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    most = max(1, found.last_layer)
    for place, row in enumerate(found.rows):
        for stretch in row.stretches:
            colour = LIGHT["rest"] if stretch.layer < 0 else depth_colour(stretch.layer / most)
            axes.barh(place, stretch.end - stretch.begin, left=stretch.begin, height=0.75, color=colour,
                      edgecolor="white", linewidth=0.4)  # fmt: skip
    axes.set_yticks(range(len(found.rows)), [_text(row.name) for row in found.rows], fontsize=6)
    axes.set_ylim(len(found.rows) - 0.5, -0.5)
    axes.set_xlim(0, found.total_steps)
    axes.grid(visible=False, axis="y")
    _titles(axes, "iteration", "trial · compute saved")
    scale = ScalarMappable(Normalize(0, most), LinearSegmentedColormap.from_list("depth", list(DEPTH_LIGHT)))
    figure = axes.figure
    bar = figure.colorbar(scale, ax=axes, location="top", aspect=50, shrink=0.6, pad=0.02)
    bar.set_label("stopped through layer number", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _variance(axes: Axes, found: Any) -> None:
    named = len(found.layers) <= _MOST_NAMED
    last_line = {line.layer: line for line in found.lines}  # the examined one if there is one
    for line in found.lines:
        label = _text(line.layer) if named and line is last_line[line.layer] else None
        axes.plot(line.iteration, line.ratio, color=depth_colour(line.place), label=label,
                  linewidth=1.6 if line.examined else 0.7, linestyle="-" if line.examined else ":")  # fmt: skip
    if len(found.stops):
        axes.scatter(found.stops.x, found.stops.y, marker="x", s=30, color=LIGHT["text"], zorder=3, label="stopped")
    for value in sorted({value for _, value in found.thresholds}):
        axes.axhline(value, color=LIGHT["limit"], linewidth=0.8, linestyle=(0, (4, 3)))
    for text, value in near_thresholds(found.thresholds, found.y_range):
        axes.annotate(_text(text), (1, value), xycoords=("axes fraction", "data"), fontsize=6, ha="right",
                      xytext=(-2, 1), textcoords="offset points", color=LIGHT["faint"])  # fmt: skip
    axes.set_ylim(*found.y_range)
    _titles(axes, "iteration", "weight variance / its peak")
    _legend(axes)


def _learning(axes: Axes, curves: Any) -> None:
    looks = {"trial": ("trial", 0.7, "-"), "baseline": ("text", 1.6, "--"), "chosen": ("chosen", 1.8, "-")}
    others = False
    for curve in curves:
        colour, width, style = looks[curve.kind]
        label = None if curve.kind == "trial" and others else curve.name
        if curve.kind == "trial":
            label, others = (None if others else "best of the others"), True
        axes.plot(curve.epoch, curve.accuracy, color=LIGHT[colour], linewidth=width, linestyle=style, label=label)
    axes.set_ylim(*accuracy_range(curves))
    _titles(axes, "epoch", "validation accuracy (%)")
    _legend(axes)


def _bars(axes: Axes, found: list[Bars], axis: str) -> None:
    names = list(dict.fromkeys(n for bars in found for n in bars.names))
    height = 0.75 / len(found)
    for place, bars in enumerate(found):
        colour = LIGHT[("front", "control", "published")[place % 3]]
        y = [names.index(n) + (place - (len(found) - 1) / 2) * height for n in bars.names]
        axes.barh(y, bars.values, height=height, color=colour, label=_text(bars.title))
    axes.set_yticks(range(len(names)), [_text(n) for n in names], fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    _titles(axes, axis, "")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _convergence(axes: Axes, found: Any) -> None:
    for name, wanted, colour in (
        ("over the allowed accuracy loss", False, "trial"),
        ("within the allowed accuracy loss", True, "front"),
    ):
        those = [i for i, within in enumerate(found.within) if within == wanted]
        axes.scatter([found.trial[i] for i in those], [found.saved[i] for i in those], s=10, color=LIGHT[colour],
                     facecolors=LIGHT[colour] if wanted else "none", label=name)  # fmt: skip
    axes.plot(
        found.trial, found.best, drawstyle="steps-post", color=LIGHT["chosen"], linewidth=1.6, label="best so far"
    )
    _trials(axes, f"{found.what} (%)")
    _legend(axes)


def _hypervolume(axes: Axes, found: Any) -> None:
    axes.plot(found.trial, found.hypervolume, drawstyle="steps-post", color=LIGHT["front"], linewidth=1.6)
    axes.set_ylim(bottom=0)
    _trials(axes, "hypervolume (% × points)")  # noqa: RUF001 - the sign of multiplication


def _cost(axes: Axes, found: Any) -> None:
    axes.plot(found.trial, found.alone, "--", color=LIGHT["trial"], linewidth=1.6, label="each trial alone")
    axes.plot(found.trial, found.executed, color=LIGHT["front"], linewidth=1.6, label="executed by the search")
    axes.set_ylim(bottom=0)
    _trials(axes, "compute (full trainings)")
    _legend(axes)
