"""One plot of the report as a Plotly figure, which the page draws.

A colour is ``@`` and a name of the palette (``@depth:0.3`` a place on the colour scale of layers, ``@depth`` the
scale). Text is literal; lines are separated by newlines. `Figure.to_dict` escapes it, because Plotly interprets tags.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
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


def plain(value: Any) -> Any:
    """Convert a value for JSON: non-finite numbers and missing values to None, numpy types to Python types."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


#: Maximum number of layers in a legend; with more, colour and hover text identify the layers.
MOST_NAMED = 8
#: Maximum number of points of a line that are marked.
MOST_MARKED = 60
#: Maximum characters in one line of a name on an axis or in a legend; the hover text has the full name.
_MOST_LETTERS = 40
#: Keys of Plotly's format whose values are shown as text.
_TEXTS = ("text", "hovertext", "name", "ticktext")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot of the report."""

    name: str  # its name on the page and of the file that its button saves
    alt: str  # text alternative for readers who cannot see the plot
    traces: list[dict[str, Any]]  # Plotly's traces
    layout: dict[str, Any]  # Plotly's layout, without the settings common to all plots
    height: int = 420  # height in pixels
    notes: list[str] = field(default_factory=list)  # sentences of the caption

    def to_dict(self) -> dict[str, Any]:
        """Return traces, layout and height as plain values for JSON, with escaped text."""
        return {"data": plain(_escaped(self.traces)), "layout": plain(_escaped(self.layout)), "height": self.height}


def _escaped(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _escaped(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item, key) for item in value]
    return html.escape(value, quote=False).replace("\n", "<br>") if isinstance(value, str) and key in _TEXTS else value


def short(name: str) -> str:
    """Shorten a name for an axis or a legend."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an axis with a title."""
    return {"title": {"text": title}, **more}


def names_axis(names: list[str], *, title: str = "", **more: Any) -> dict[str, Any]:
    """Return the settings of a vertical axis with a name at each integer, the first at the top."""
    return axis(title, tickvals=list(range(len(names))), ticktext=names, showgrid=False, **more)


def depth(place: int, count: int) -> str:
    """Return the colour of a layer by its place among so many."""
    return f"@depth:{place / max(1, count - 1):.3f}"


def marks(name: str, points: pd.DataFrame, symbol: str, colour: str, *, size: Any = 10, **more: Any) -> dict[str, Any]:
    """Return a trace of points, from their columns x, y and label."""
    hollow = symbol.endswith("-open")
    edge = {"width": 1.5, "color": colour} if hollow else {"width": 1, "color": "@ground"}
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": points["x"].tolist(), "y": points["y"].tolist(),
        "hoverinfo": "text", "hovertext": points["label"].tolist(),
        "marker": {"symbol": symbol, "color": colour, "size": size, "line": edge}, **more,
    }  # fmt: skip


def line(
    name: str, x: Iterable[float], y: Iterable[float], labels: Iterable[str], *, more: dict[str, Any] | None = None,
    **style: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a trace of a line with hover texts, or none.

    ``name`` is its entry in the legend, ``more`` has further settings of the trace, ``style`` those of the line.
    """
    hover = list(labels)
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": style,
        **({"hoverinfo": "text", "hovertext": hover} if hover else {"hoverinfo": "skip"}), **(more or {}),
    }  # fmt: skip


def bars(rows: Iterable[int], begins: Iterable[float], lengths: Iterable[float], labels: list[str], colours: Any,
         **more: Any) -> dict[str, Any]:  # fmt: skip
    """Return a trace of horizontal bars, each from its begin on."""
    return {
        "type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False, "y": list(rows),
        "base": list(begins), "x": list(lengths), "hovertext": labels, "marker": {"color": colours, **more},
    }  # fmt: skip


def limit(value: float) -> dict[str, Any]:
    """Return a horizontal line across the plot."""
    return {
        "type": "line", "y0": value, "y1": value, "xref": "paper", "x0": 0, "x1": 1,
        "line": {"color": "@limit", "width": 1.2, "dash": "dash"}, "layer": "below",
    }  # fmt: skip


def note(text: str, *, x: float, y: float) -> dict[str, Any]:
    """Return a short text at the left (x 0) or the right (x 1) edge of the plot, just above a horizontal line."""
    return {
        "text": text, "x": x, "xref": "paper", "y": y, "yref": "y", "xanchor": "right" if x else "left",
        "yanchor": "bottom", "showarrow": False, "bgcolor": "@ground", "opacity": 0.85,
        "font": {"color": "@faint", "size": 11},
    }  # fmt: skip
