"""Parts of sections of the page as HTML. All text is escaped with `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from analysis.presentation.figures.figure import Figure


class Markup(str):
    """A table's cell that is HTML already."""

    __slots__ = ()


def none(why: str) -> str:
    """Return a faint paragraph that says why something is missing."""
    return f'<p class="none">{escape(why)}</p>'


def pictures(figures: Mapping[str, Figure], *names: str) -> str:
    """Return those of the named figures that exist."""
    return "".join(picture(figures[name]) for name in names if name in figures)


def picture(figure: Figure) -> str:
    """Return the place in which the page's script draws a figure, with its caption."""
    notes = " ".join(escape(note) for note in figure.notes)
    caption = f"<figcaption>{notes}</figcaption>" if notes else ""
    return (
        f'<figure><div class="plot" id="plot-{figure.name}" data-figure="{figure.name}" role="img" '
        f'aria-label="{escape(figure.alt)}" style="height:{figure.height}px"></div>{caption}</figure>'
    )


def facts(kind: str, cells: Iterable[tuple[str, str]]) -> str:
    """Return a description list from names and the HTML of their values; empty without any."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in cells)
    return f'<dl class="{kind}">{shown}</dl>' if shown else ""


def small_table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()
) -> str:
    """Return a table in its own scrollable box; cells are text, or `Markup`."""
    number_class = [' class="number"' if i in numeric else "" for i in range(len(heads))]
    head = "".join(f'<th scope="col"{c}>{escape(h)}</th>' for h, c in zip(heads, number_class, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{_cell(v)}</td>" for v, c in zip(row, number_class, strict=True)) + "</tr>"
        for row in rows
    )
    inner = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return scrollable(caption, f"<table>{inner}</table>")


def _cell(value: str) -> str:
    return value if isinstance(value, Markup) else escape(value)


def scrollable(label: str, body: str, *, kind: str = "scroll") -> str:
    """Return a box that scrolls, also by keyboard."""
    return f'<div class="{kind}" tabindex="0" role="group" aria-label="{escape(label)}">{body}</div>'
