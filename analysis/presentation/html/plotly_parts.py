"""Parts of the page's plots in Plotly's format: text, marks, lines and notes.

A colour is ``@`` and a name of the palette (``@depth:0.3`` a place on the colour scale of layers, ``@depth`` the
scale); the page replaces it by the colour of the light or the dark scheme. Text is escaped with `safe`, because Plotly
interprets tags in it.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from analysis.presentation.figures.outcomes import Points
from analysis.presentation.figures.plain_columns import plain

#: Maximum characters of a name on an axis; the hover text has the full name.
MOST_LETTERS = 26


@dataclass(frozen=True, kw_only=True)
class PlotlyFigure:
    """One plot of the page."""

    name: str
    """Its name on the page and of its PNG file."""
    alt: str
    """Text alternative for readers who cannot see the plot."""
    traces: list[dict[str, Any]]
    """Plotly's traces."""
    layout: dict[str, Any]
    """Plotly's layout, without the settings common to all plots."""
    height: int = 420
    """Height in pixels."""
    notes: list[str] = field(default_factory=list)
    """Sentences of the caption."""

    def to_dict(self) -> dict[str, Any]:
        """Return traces, layout and height as plain values for JSON."""
        return {"data": plain(self.traces), "layout": plain(self.layout), "height": self.height}


def safe(text: str) -> str:
    """Escape text so that Plotly shows it literally."""
    return html.escape(text, quote=False).replace("\n", "<br>")


def short(name: str, letters: int = MOST_LETTERS) -> str:
    """Shorten a name to at most ``letters`` characters."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an axis with a title."""
    return {"title": {"text": title}, **more}


def marks(name: str, found: Points, symbol: str, colour: str, *, size: float = 10, **more: Any) -> dict[str, Any]:
    """Return a trace of points; their labels are escaped."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": found.x,
        "y": found.y,
        "hoverinfo": "text",
        "hovertext": [safe(label) for label in found.labels],
        "marker": {"symbol": symbol, "color": colour, "size": size, "line": {"width": 1, "color": "@ground"}},
        **more,
    }


def line_of(value: float, *, axis: str, colour: str = "@limit", dash: str = "dash") -> dict[str, Any]:
    """Return a line across the plot at one value of an axis."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "line", f"{axis}0": value, f"{axis}1": value, f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1,
        "line": {"color": colour, "width": 1.2, "dash": dash}, "layer": "below",
    }  # fmt: skip


def note(text: str, *, x: float, y: float, right: bool = False) -> dict[str, Any]:
    """Return a short text at the edge of the plot, just above a horizontal line."""
    return {
        "text": safe(text), "x": x, "xref": "paper", "y": y, "yref": "y", "xanchor": "right" if right else "left",
        "yanchor": "bottom", "showarrow": False, "bgcolor": "@ground", "opacity": 0.85,
        "font": {"color": "@faint", "size": 11},
    }  # fmt: skip
