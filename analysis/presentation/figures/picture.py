"""A plot of the report as a picture in a file, drawn by matplotlib: no browser is needed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.palette import LIGHT
from trainables.errors import UserError

#: Metadata without a date, by the suffixes of the kinds of files.
SUFFIXES: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
#: Plotly's names of symbols and ways of lines, by matplotlib's.
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "star": "*", "triangle-down": "v"}
_STEPS, _DASHES = {"vh": "steps-pre"}, {"dash": "--"}
#: Matplotlib's unit of length in Plotly's pixels.
_PT = 0.75


def picture_of(figure: Figure, suffix: str) -> bytes:
    """Return a plot of points and lines in the light colours, as the content of a file with a suffix, such as ``.svg``.

    UserError: the suffix is not one of `SUFFIXES`, or matplotlib is not installed.
    """
    if suffix not in SUFFIXES:
        raise UserError(f"a picture's name must end in one of {', '.join(SUFFIXES)}, got {suffix or 'no suffix'}")
    try:
        import matplotlib
        from matplotlib.figure import Figure as Picture
    except ImportError:
        raise UserError("a picture needs matplotlib, which is not installed: pip install 'tune-cac[picture]'") from None
    picture = Picture(figsize=(7.5, figure.height / 96), layout="constrained")
    axes = picture.add_subplot()
    for trace in figure.traces:
        _draw(axes, trace)
    for shape in figure.layout["shapes"]:
        axes.axhline(shape["y0"], zorder=0, **_line_of(shape["line"]))
    for note in figure.layout["annotations"]:
        axes.annotate(
            note["text"], (note["x"], note["y"]), xycoords=axes.get_yaxis_transform(), color=_colour(note["font"]),
            fontsize=_PT * note["font"]["size"], va="bottom", xytext=(3, 1), textcoords="offset points",
        )  # fmt: skip
    x, y = figure.layout["xaxis"], figure.layout["yaxis"]
    axes.set(xlabel=x["title"]["text"], ylabel=y["title"]["text"], xlim=x.get("range"), ylim=y.get("range"))
    axes.grid(color=LIGHT["line"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside upper left", ncols=3, frameon=False, fontsize="small")
    # Text as text, no date and no random names: the same study gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tune_cac"}):
        picture.savefig(content := io.BytesIO(), format=suffix[1:], dpi=150, metadata=SUFFIXES[suffix])
    return content.getvalue()


def _draw(axes: Any, trace: Mapping[str, Any]) -> None:
    x, y, marker = trace["x"], trace["y"], trace["marker"]
    if "lines" in trace["mode"]:
        axes.plot(x, y, drawstyle=_STEPS.get(trace["line"].get("shape", ""), "default"), **_line_of(trace["line"]))
    sizes = marker["size"] if isinstance(marker["size"], list) else [marker["size"]] * len(x)
    axes.scatter(
        x, y, s=[(_PT * size) ** 2 for size in sizes], c=_colour(marker), marker=_MARKERS[marker["symbol"]],
        edgecolors=_colour(marker["line"]), linewidths=_PT * marker["line"]["width"], label=trace["name"],
        alpha=trace.get("opacity"), zorder=3,
    )  # fmt: skip


def _line_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "color": _colour(line), "linewidth": _PT * line["width"], "linestyle": _DASHES.get(line.get("dash", ""), "-")
    }  # fmt: skip


def _colour(values: Mapping[str, Any]) -> str:
    return LIGHT[values["color"].removeprefix("@")]
