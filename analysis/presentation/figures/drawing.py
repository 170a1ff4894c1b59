"""A plot of the report, drawn by matplotlib: for the page as SVG in the reader's colours, or as a picture in a file."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from analysis.presentation.figures.figure import Axis, Bars, Figure, Points
from analysis.presentation.figures.palette import DEPTH, LIGHT
from trainables.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

#: Metadata without a date, by the suffixes of the kinds of files.
SUFFIXES: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
#: Inches of a pixel of a page, and matplotlib's points.
_INCH, _PT = 1 / 96, 0.75
#: Widths of a picture in a file and of a plot in the page, in pixels.
_PICTURE_WIDTH, _PAGE_WIDTH = 720, 1040
#: Maximum decades of a logarithmic axis with ticks between the powers of ten.
_MOST_DECADES = 3
#: Widths of a legend's symbol with its gaps, and of a letter, in pixels.
_SYMBOL_WIDTH, _LETTER_WIDTH = 60, 7.5
#: Width of what reacts to the pointer along a line, in an SVG's units.
_REACH = 8
#: What XML or a font cannot have.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def picture_of(figure: Figure, suffix: str) -> bytes:
    """Return a plot in the light colours as the content of a file with a suffix, such as ``.svg``.

    The same plot gives the same content. UserError: the suffix is not one of `SUFFIXES`.
    """
    if suffix not in SUFFIXES:
        raise UserError(f"a picture's name must end in one of {', '.join(SUFFIXES)}, got {suffix or 'no suffix'}")
    with _drawn(figure, _PICTURE_WIDTH) as (picture, _):
        picture.savefig(content := io.BytesIO(), format=suffix[1:], dpi=150, metadata=SUFFIXES[suffix])
    return content.getvalue()


def svg_of(figure: Figure) -> str:
    """Return a plot as an SVG element for the page: colours are the page's variables, labels titles of marks."""
    with _drawn(figure, _PAGE_WIDTH) as (picture, labels):
        none: dict[str, None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        picture.savefig(content := io.BytesIO(), format="svg", transparent=True, metadata=none)
    root = ElementTree.fromstring(content.getvalue())
    colours = {LIGHT[name]: f"var(--{name})" for name in LIGHT} | {
        _colour(name): _mixed(name) for name in _colours(figure) if name.startswith("@depth:")
    }
    for element in root.iter():  # HTML has no namespaces
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if style := element.get("style"):
            style = re.sub(r"font-family: [^;]*(; )?", "", style)  # the page's own
            style = re.sub("#[0-9a-f]{6}", lambda found: colours.get(found[0], found[0]), style)
            element.set("style", style)
    used = {element.get("href", "")[1:] for element in root.iter()}
    used |= {found for element in root.iter() for found in re.findall(r"url\(#(.*?)\)", element.get("clip-path", ""))}
    for element in list(root.iter()):
        _label(element, labels.get(element.get("id", ""), ()))
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    del root.attrib["width"], root.attrib["height"]  # as wide as its place in the page
    return ElementTree.tostring(root, "unicode")


@contextmanager
def _drawn(figure: Figure, width: int) -> Iterator[tuple[Picture, dict[str, Sequence[str]]]]:
    """Draw a plot; give the picture, and the labels of its marks by the id of their group in an SVG file.

    Settings of the user's matplotlib have no effect, and it is silent: on missing glyphs, on folders it cannot write.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    ink, faint = LIGHT["text"], LIGHT["faint"]
    settings = {
        # Text as text, and no random names: the same study gives the same file, and another plot other names.
        "svg.fonttype": "none", "svg.hashsalt": figure.name, "font.family": "sans-serif", "font.size": 9.5,
        "text.parse_math": False, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": faint,
        "xtick.color": faint, "ytick.color": faint, "xtick.labelcolor": ink, "ytick.labelcolor": ink,
        "axes.formatter.useoffset": False, "axes.formatter.limits": (-4, 7),
    }  # fmt: skip
    own = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    labels: dict[str, Sequence[str]] = {}
    entries: dict[str, list[Any]] = {}
    with matplotlib.rc_context(own | settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ")
        picture = Picture(figsize=(width * _INCH, figure.height * _INCH), layout="constrained")
        axes = picture.add_subplot()
        for place, trace in enumerate(figure.traces):
            name = f"{figure.name}-{place}"
            if isinstance(trace, Bars):
                labels |= _bars(axes, trace, name)
                continue
            own_labels, handles = _points(axes, trace, figure, name)
            labels |= own_labels
            if trace.name:
                entries.setdefault(_printable(trace.name), []).extend(handles)
        for text, y in figure.limits.items():
            axes.axhline(y, zorder=0, color=LIGHT["limit"], linewidth=_PT * 1.2, linestyle="--")
            axes.annotate(
                _printable(text), (0, y), xycoords=axes.get_yaxis_transform(), xytext=(3, 1),
                textcoords="offset points", color=faint, fontsize="small", va="bottom",
            )  # fmt: skip
        _axis(axes, "x", figure.x)
        _axis(axes, "y", figure.y)
        axes.spines[["top", "right"]].set_visible(False)
        entries |= {name: [Patch(color=_colour(colour))] for name, colour in figure.swatches.items()}
        if entries:
            widths = [_SYMBOL_WIDTH + _LETTER_WIDTH * len(name) for name in entries]
            beside = len(entries) if sum(widths) <= width else max(1, int(width / max(widths)))
            combined: list[Any] = [tuple(handles) for handles in entries.values()]
            picture.legend(
                combined, [f" {name}" if name.startswith("_") else name for name in entries],  # which it leaves out
                loc="outside upper left", ncols=beside, frameon=False,
            )  # fmt: skip
        yield picture, labels


def _points(axes: Any, trace: Points, figure: Figure, name: str) -> tuple[dict[str, Sequence[str]], list[Any]]:
    """Draw marks and line; return the labels by id, and what the legend shows."""
    colour, handles = _colour(trace.colour), []
    labels: dict[str, Sequence[str]] = {}
    if trace.line_width:
        handles += axes.plot(
            trace.x, trace.y, drawstyle="steps-pre" if trace.steps else "default", color=colour, alpha=trace.opacity,
            linewidth=_PT * trace.line_width, linestyle="--" if trace.dashed else "-", gid=f"{name}-line",
        )  # fmt: skip
        labels[f"{name}-line"] = () if trace.symbol else trace.labels
    if len(trace.below):
        axes.errorbar(trace.x, trace.y, xerr=(trace.below, trace.above), fmt="none", ecolor=colour, capsize=3)
    if trace.symbol:
        # Matplotlib draws some of the marks that lie outside, and some of those that are no numbers.
        seen = _inside(trace.x, figure.x) & _inside(trace.y, figure.y)
        x, y = (np.asarray(values, dtype=float)[seen] for values in (trace.x, trace.y))
        size = np.asarray(trace.size, dtype=float)
        marks = axes.scatter(
            x, y, s=(_PT * (size[seen] if size.ndim else size)) ** 2, marker=trace.symbol, alpha=trace.opacity,
            facecolors="none" if trace.hollow else colour,
            # A thin line in the ground's colour parts marks that overlap; strokes have no outline.
            edgecolors=colour if trace.hollow else None if trace.symbol == "|" else LIGHT["ground"],
            linewidths=_PT * (1.5 if trace.hollow else 1), zorder=3, gid=name,
        )  # fmt: skip
        handles.append(marks)
        labels[name] = [label for label, is_seen in zip(trace.labels, seen, strict=bool(trace.labels)) if is_seen]
    return labels, handles


def _inside(values: Sequence[float], axis: Axis) -> NDArray[np.bool_]:
    """Return for each value whether it is a number within an axis."""
    found = np.asarray(values, dtype=float)
    low, high = sorted(axis.range or (-np.inf, np.inf))
    return np.isfinite(found) & (low <= found) & (found <= high)


def _bars(axes: Any, trace: Bars, name: str) -> dict[str, Sequence[str]]:
    """Draw bars; return the labels by id."""
    drawn = axes.barh(
        trace.rows, trace.lengths, left=trace.begins, height=0.7, color=[_colour(colour) for colour in trace.colours],
        edgecolor=LIGHT["ground"], linewidth=_PT,
    )  # fmt: skip
    for place, bar in enumerate(drawn):
        bar.set_gid(f"{name}-{place}")
    return {f"{name}-{place}": (label,) for place, label in enumerate(trace.labels)}


def _axis(axes: Any, which: str, wanted: Axis) -> None:
    """Set title, range, scale and ticks of one axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    own = getattr(axes, f"{which}axis")
    axes.set(**{f"{which}label": _printable(wanted.title)})
    if wanted.logarithmic:
        axes.set(**{f"{which}scale": "log"})
        low, high = own.get_data_interval()
        own.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low <= 10**_MOST_DECADES else (1,)))
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        own.set_minor_locator(LogLocator(subs=()))
    if wanted.range is not None:
        axes.set(**{f"{which}lim": wanted.range})
    if wanted.names:
        own.set_ticks(range(len(wanted.names)), [_printable(name) for name in wanted.names])
        own.set_tick_params(length=0)
    else:
        axes.grid(axis=which, color=LIGHT["line"], linewidth=0.6)
        axes.set_axisbelow(True)
    if wanted.zero_line:
        (axes.axvline if which == "x" else axes.axhline)(0, color=LIGHT["faint"], linewidth=0.8, zorder=0)


def _label(group: ElementTree.Element, labels: Sequence[str]) -> None:
    """Add the labels of marks to them as titles; one label of a line is that of the whole."""
    defined = {id(element) for defs in group.iter("defs") for element in defs.iter()}
    marks = [element for element in group.iter() if element.tag in ("use", "path") and id(element) not in defined]
    if labels and group.get("id", "").endswith("-line"):  # easier to meet than the thin line itself
        marks = [copy(marks[0])]
        marks[0].set("style", f"fill: none; stroke: transparent; stroke-width: {_REACH}; pointer-events: stroke")
        group.append(marks[0])
    for mark, label in zip(marks, labels, strict=bool(labels)):
        title = ElementTree.Element("title")
        title.text = _printable(label)
        mark.append(title)


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)


def _colours(figure: Figure) -> set[str]:
    """Return the names of all colours of a plot."""
    found = set(figure.swatches.values())
    for trace in figure.traces:
        found |= set(trace.colours) if isinstance(trace, Bars) else {trace.colour}
    return found


def _colour(name: str) -> str:
    """Return the light scheme's value of a colour, ``@`` and its name, or ``@depth:`` and a place from 0 to 1."""
    if not name.startswith("@depth:"):
        return LIGHT[name.removeprefix("@")]
    first, second, share = _between(name)
    parts = (
        round((1 - share) * int(LIGHT[first][at : at + 2], 16) + share * int(LIGHT[second][at : at + 2], 16))
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def _mixed(name: str) -> str:
    """Return the page's expression for a place on the colour scale of layers."""
    first, second, share = _between(name)
    return f"color-mix(in srgb,var(--{second}) {100 * share:.4g}%,var(--{first}))"


def _between(name: str) -> tuple[str, str, float]:
    """Return the two roles between which a place on the colour scale lies, and its share of the second."""
    place = min(1.0, max(0.0, float(name.removeprefix("@depth:")))) * (len(DEPTH) - 1)
    low = min(int(place), len(DEPTH) - 2)
    return DEPTH[low], DEPTH[low + 1], place - low
