"""One plot of the report as plain values, which `figures.drawing` draws.

A colour is ``@`` and a name of the palette, or ``@depth:0.3``, a place on the colour scale of layers. Lines of a label
are separated by newlines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.saving import saved_of
from trainables.quality import Quality


def saved(frame: pd.DataFrame) -> NDArray[np.float64]:
    """Return each trial's saving of the compute that its study ranks by; NaN if unknown."""
    return np.asarray(saved_of(frame), dtype=np.float64)


def texts(frame: pd.DataFrame, name: str) -> list[str]:
    """Return a column as text; empty for missing values or a missing column."""
    if name not in frame.columns:
        return [""] * len(frame)
    return ["" if pd.isna(value) else str(value) for value in frame[name]]


def is_one_of(frame: pd.DataFrame, name: str, *wanted: str) -> NDArray[np.bool_]:
    """Return for each row whether the column has one of these texts, (N,)."""
    return np.array([text in wanted for text in texts(frame, name)], dtype=bool)


def stop_events(value: Any) -> list[dict[str, Any]]:
    """Return the stops of a trial (column ``stop_events``, JSON) by iteration; none for a missing value."""
    events = json.loads(value) if isinstance(value, str) and value else []
    return sorted(events, key=lambda event: int(event["iteration"]))


def percent_values(fractions: NDArray[np.float64]) -> list[float]:
    """Return fractions as percentages, rounded to remove floating-point noise."""
    return [round(100 * float(value), 6) + 0.0 for value in fractions]  # adding 0.0 turns -0.0 into 0.0


def metric_values(values: NDArray[np.float64], quality: Quality) -> list[float]:
    """Return values of a metric, or drops, as plotted: fractions as percentages; without floating-point noise."""
    return percent_values(values) if quality.is_fraction else [float(f"{value:.12g}") for value in values]


#: Maximum number of layers in a legend; with more, colour and label identify the layers.
MOST_NAMED = 8
#: Maximum number of points of a line that are marked.
MOST_MARKED = 60
#: Maximum characters in one line of a name on an axis or in a legend; the label has the full name.
_MOST_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class Points:
    """Marks at points, a line through them, or both."""

    name: str = ""
    """In the legend; empty for no entry."""
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    """Texts that the page shows at the pointer, one a point, or one for all; empty for none."""
    colour: str
    symbol: str = ""
    """Matplotlib's marker; empty for a line alone."""
    hollow: bool = False
    """True for marks that are outlines."""
    size: float | Sequence[float] = 10.0
    """Diameter of the marks in pixels, one for all or one a point."""
    line_width: float = 0.0
    """In pixels; 0 for no line."""
    dashed: bool = False
    steps: bool = False
    """True for a line that goes up or down first, then across."""
    opacity: float = 1.0
    below: Sequence[float] = ()
    """Lengths of the error bars to lower x, one a point; empty for none."""
    above: Sequence[float] = ()
    """To higher x."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, each from its begin on."""

    rows: Sequence[int]
    begins: Sequence[float]
    lengths: Sequence[float]
    labels: Sequence[str]
    """Texts that the page shows at the pointer, one a bar."""
    colours: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a plot."""

    title: str = ""
    range: tuple[float, float] | None = None
    """Values at its begin and its end; None for what the data need."""
    names: Sequence[str] = ()
    """Names in place of numbers, at 0, 1 and so on."""
    logarithmic: bool = False
    zero_line: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot of the report."""

    name: str
    """Its name on the page."""
    alt: str
    """Text alternative for readers who cannot see the plot."""
    traces: Sequence[Points | Bars]
    x: Axis
    y: Axis
    limits: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines across the plot, by the text at their left end."""
    swatches: Mapping[str, str] = field(default_factory=dict)
    """Colours in the legend by their meaning, beside the traces' names."""
    height: int = 420
    """In pixels."""
    notes: Sequence[str] = ()
    """Sentences of the caption."""


def short(name: str) -> str:
    """Shorten a name for an axis or a legend."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"


def names_axis(names: Sequence[str], *, margin: float = 0.6, title: str = "") -> Axis:
    """Return a vertical axis with a name at each integer, the first at the top."""
    return Axis(title=title, names=names, range=(len(names) - 1 + margin, -margin))


def depth(place: int, count: int) -> str:
    """Return the colour of a layer by its place among so many."""
    return f"@depth:{place / max(1, count - 1):.3f}"


def marks(name: str, points: pd.DataFrame, symbol: str, colour: str, **more: Any) -> Points:
    """Return a trace of points, from their columns x, y and label."""
    x, y, labels = (points[column].tolist() for column in ("x", "y", "label"))
    return Points(name=name, x=x, y=y, labels=labels, symbol=symbol, colour=colour, **more)
