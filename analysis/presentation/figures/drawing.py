"""A plot of the report, drawn by matplotlib: for the page as SVG in the reader's colours, or as a picture in a file."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

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
#: Most entries of a legend beside each other.
_MOST_BESIDE = 6
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


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
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(content.getvalue())
    used = {element.get(f"{{{_XLINK}}}href", "")[1:] for element in root.iter()}
    used |= {found for element in root.iter() for found in re.findall(r"url\(#(.*?)\)", element.get("clip-path", ""))}
    for element in root.iter():
        _label(element, labels.get(element.get("id", ""), ()))
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    del root.attrib["width"], root.attrib["height"]  # as wide as its place in the page
    colours = {LIGHT[name]: f"var(--{name})" for name in LIGHT} | {
        _colour(name): _mixed(name) for name in _colours(figure) if name.startswith("@depth:")
    }
    text = re.sub(r"font-family: [^;\"]*(; )?", "", ElementTree.tostring(root, "unicode"))  # the page's own
    return re.sub('#[0-9a-f]{6}(?=[;"])', lambda found: colours.get(found[0], found[0]), text)


@contextmanager
def _drawn(figure: Figure, width: int) -> Iterator[tuple[Picture, dict[str, Sequence[str]]]]:
    """Draw a plot; give the picture, and the labels of its marks by the id of their group in an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    ink, faint = LIGHT["text"], LIGHT["faint"]
    settings = {
        # Text as text, and no random names: the same study gives the same file, and another plot other names.
        "svg.fonttype": "none", "svg.hashsalt": figure.name, "font.family": "sans-serif", "font.size": 9.5,
        "text.parse_math": False, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": faint,
        "xtick.color": faint, "ytick.color": faint, "xtick.labelcolor": ink, "ytick.labelcolor": ink,
    }  # fmt: skip
    labels: dict[str, Sequence[str]] = {}
    with matplotlib.rc_context(settings):
        picture = Picture(figsize=(width * _INCH, figure.height * _INCH), layout="constrained")
        axes = picture.add_subplot()
        for place, trace in enumerate(figure.traces):
            name = f"{figure.name}-{place}"
            labels |= _bars(axes, trace, name) if isinstance(trace, Bars) else _points(axes, trace, name)
        for text, y in figure.limits.items():
            axes.axhline(y, zorder=0, color=LIGHT["limit"], linewidth=_PT * 1.2, linestyle="--")
            axes.annotate(
                text, (0, y), xycoords=axes.get_yaxis_transform(), color=faint, fontsize="small", va="bottom",
                xytext=(3, 1), textcoords="offset points",
            )  # fmt: skip
        _axis(axes, "x", figure.x)
        _axis(axes, "y", figure.y)
        axes.spines[["top", "right"]].set_visible(False)
        entries: dict[str, list[Any]] = {}
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, []).append(handle)  # of line and marks one entry
        entries |= {name: [Patch(color=_colour(colour))] for name, colour in figure.swatches.items()}
        if entries:
            handles: list[Any] = [tuple(entry) for entry in entries.values()]
            picture.legend(
                handles, entries.keys(), loc="outside upper left",
                ncols=min(len(entries), round(_MOST_BESIDE * width / _PAGE_WIDTH)), frameon=False,
            )  # fmt: skip
        yield picture, labels


def _points(axes: Any, trace: Points, name: str) -> dict[str, Sequence[str]]:
    """Draw marks and line; return the labels by id."""
    colour, labels = _colour(trace.colour), {}
    if trace.line_width:
        axes.plot(
            trace.x, trace.y, drawstyle="steps-pre" if trace.steps else "default", color=colour, alpha=trace.opacity,
            linewidth=_PT * trace.line_width, linestyle="--" if trace.dashed else "-", gid=f"{name}-line",
            label=trace.name,
        )  # fmt: skip
        labels[f"{name}-line"] = () if trace.symbol else trace.labels
    if len(trace.below):
        axes.errorbar(trace.x, trace.y, xerr=(trace.below, trace.above), fmt="none", ecolor=colour, capsize=3)
    if trace.symbol:
        axes.scatter(
            trace.x, trace.y, s=(_PT * np.asarray(trace.size)) ** 2, marker=trace.symbol, alpha=trace.opacity,
            facecolors="none" if trace.hollow else colour,
            # A thin line in the ground's colour parts marks that overlap; strokes have no outline.
            edgecolors=colour if trace.hollow else None if trace.symbol == "|" else LIGHT["ground"],
            linewidths=_PT * (1.5 if trace.hollow else 1), label=trace.name, zorder=3, gid=name,
        )  # fmt: skip
        labels[name] = trace.labels
    return labels


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
    axes.set(**{f"{which}label": wanted.title})
    if wanted.logarithmic:
        axes.set(**{f"{which}scale": "log"})
        low, high = own.get_data_interval()
        own.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low <= 10**_MOST_DECADES else (1,)))
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        own.set_minor_locator(LogLocator(subs=()))
    if wanted.range is not None:
        axes.set(**{f"{which}lim": wanted.range})
    if wanted.names:
        own.set_ticks(range(len(wanted.names)), wanted.names)
        own.set_tick_params(length=0)
    else:
        axes.grid(axis=which, color=LIGHT["line"], linewidth=0.6)
        axes.set_axisbelow(True)
    if wanted.zero_line:
        axes.axvline(0, color=LIGHT["faint"], linewidth=0.8, zorder=0)


def _label(group: ElementTree.Element, labels: Sequence[str]) -> None:
    """Add the labels of marks to them as titles; one label is that of the whole group."""
    if len(labels) == 1:
        marks = [group]
    else:
        defined = {id(element) for defs in group.iter(f"{{{_SVG}}}defs") for element in defs.iter()}
        kinds = (f"{{{_SVG}}}use", f"{{{_SVG}}}path")
        marks = [element for element in group.iter() if element.tag in kinds and id(element) not in defined]
    for mark, label in zip(marks, labels, strict=bool(labels)):
        title = ElementTree.Element(f"{{{_SVG}}}title")
        title.text = label
        mark.insert(0, title)


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
