"""What the page's plots are put together from: text, marks, lines and notes as Plotly takes them.

Colours are names of the palette behind an ``@`` (``@depth:0.3`` a place on the scale of layers, ``@depth`` the scale):
the page puts in those of the light or the dark scheme. Text goes through `safe`, for Plotly reads tags in it.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from analysis.presentation.figures.outcomes import Points
from analysis.presentation.html.plain_columns import plain

#: Characters of a name on an axis; the rest is in what is said of it.
MOST_LETTERS = 26


@dataclass(frozen=True, kw_only=True)
class PlotlyFigure:
    """One plot of the page."""

    name: str
    """Its name in the page and of its PNG."""
    alt: str
    """What a reader who does not see it is told."""
    traces: list[dict[str, Any]]
    """Plotly's traces."""
    layout: dict[str, Any]
    """Plotly's layout, without what all plots have in common."""
    height: int = 420
    """Pixels."""
    notes: list[str] = field(default_factory=list)
    """What is said under it."""

    def to_dict(self) -> dict[str, Any]:
        """What the page draws, ready for JSON."""
        return {"data": plain(self.traces), "layout": plain(self.layout), "height": self.height}


def safe(text: str) -> str:
    """Text that Plotly shows as it stands."""
    return html.escape(text, quote=False).replace("\n", "<br>")


def short(name: str, letters: int = MOST_LETTERS) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def marks(name: str, found: Points, symbol: str, colour: str, *, size: float = 10, **more: Any) -> dict[str, Any]:
    """A trace of points; none of its text is read as markup."""
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
    """A line across the plot at one value."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "line", f"{axis}0": value, f"{axis}1": value, f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1,
        "line": {"color": colour, "width": 1.2, "dash": dash}, "layer": "below",
    }  # fmt: skip


def note(text: str, *, x: float, y: float, right: bool = False) -> dict[str, Any]:
    """A word at the edge of the plot, over a line there."""
    return {
        "text": safe(text), "x": x, "xref": "paper", "y": y, "yref": "y", "xanchor": "right" if right else "left",
        "yanchor": "bottom", "showarrow": False, "bgcolor": "@ground", "opacity": 0.85,
        "font": {"color": "@faint", "size": 11},
    }  # fmt: skip
