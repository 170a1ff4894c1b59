"""The stage tree as a picture: a self-contained SVG with one lane per stage. Pure: a frame in, text out.

A bar covers the iterations of its stage and is connected by a thin line to its parent's bar. The children of a stage
are drawn latest first, so that no line crosses a bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from analysis.formatting import percent, plural
from analysis.presentation.figures.palette import depth_colour
from analysis.presentation.stage_frame import most_visited
from analysis.quality_words import value_text
from trainables.quality import ACCURACY, Quality
from trainables.savings import TRAINING, saved_words

#: Maximum number of lanes in a picture; further stages are counted in its last line.
MOST_LANES = 60

# Lengths in pixels.
_MARGIN = 24
_PLOT_WIDTH = 560
_LANE = 20
_BAR = 11
_FIRST_LANE = 128
_INDENT = 8
_MOST_INDENTS = 8
_LETTER = 6.7  # width at 11 px, enough for the widest of the listed fonts
_MOST_LETTERS = 60
_LABELS = "what was done, at which iteration"
_NUMBERS, _METRIC = {"trials": 58, "saved": 64}, 70  # columns and their widths; that of the metric comes last
_TICK_STEP = 0.5  # checkpoints closer together share one tick

_TEXT, _FAINT, _LINE, _GRID, _STRIPE, _UNKNOWN = "#1f2933", "#52606d", "#8491a0", "#d9dee3", "#f5f7f9", "#aab4be"
#: From nothing saved to the most saved; all contrast with the background, and with each other also in grey print.
_SCALE = ("#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """A stage in the picture."""

    row: Mapping[Any, Any]
    """Its row of the frame."""
    begin: int
    """The iteration at which it branches off its parent, 0 for a root stage."""
    label: str
    """Its text beside the bar."""
    indent: int
    """Distance of the label from the column's left edge."""
    y: float
    """Vertical middle of its bar."""
    parent_y: float | None
    """Vertical middle of its parent's bar, None for a root stage."""


def tree_svg(frame: pd.DataFrame, total_steps: int, *, title: str | None = None) -> str:
    """Draw the tree: iterations on the horizontal axis, one bar per stage, shared parts of runs drawn once.

    Bars are coloured by the compute saved of the run that ends in them; ticks under a bar are checkpoints. Of more than
    `MOST_LANES` stages, those with the fewest trials are counted in a line instead of drawn.

    Args:
        frame: from `analysis.stage_frame`, in its order, with at least one row.
        total_steps: iterations of a whole run.
        title: title, for example "24 trials for 3.4 full trainings"; None for the number of trials.

    Returns:
        The SVG's text. Each drawn stage is a ``rect`` of class ``stage`` with its id in ``data-stage``.
    """
    assert len(frame) > 0
    shown = most_visited(frame, MOST_LANES)
    drawn = frame[frame["stage"].isin(shown)]
    folded = frame[~frame["stage"].isin(shown)]
    lanes = list(_lanes(drawn, several=frame["root"].nunique() > 1))
    most_saved = max(0.0, float(drawn["saved"].fillna(0.0).max()))
    label_x = _MARGIN + _PLOT_WIDTH + 24
    numbers_x = label_x + max(_LETTER * len(_LABELS), *(_LETTER * len(lane.label) + lane.indent for lane in lanes))
    quality: Quality = frame.attrs.get("quality", ACCURACY)
    widths = {**_NUMBERS, quality.name: max(_METRIC, round(_LETTER * len(quality.name)) + 14)}
    width = round(numbers_x + sum(widths.values()) + _MARGIN)
    bottom = _FIRST_LANE + _LANE * len(lanes)
    height = bottom + (_LANE if len(folded) else 0) + _MARGIN // 2
    if title is None:
        title = plural(len({trial for trials in frame["trials"] for trial in trials}), "trial")

    def x(iteration: float) -> float:
        return _MARGIN + _PLOT_WIDTH * min(max(iteration / max(1, total_steps), 0.0), 1.0)

    parts = [
        *_head(width, height, title),
        *_legend(saved_words(frame.attrs.get("saving", TRAINING)), most_saved),
        _text(_MARGIN + _PLOT_WIDTH / 2, _FIRST_LANE - 29, "iteration", fill=_FAINT, anchor="middle"),
        *_row_of_texts(_FIRST_LANE - 10, label_x, _LABELS, numbers_x, list(widths), widths, fill=_FAINT),
    ]
    for lane in lanes[::2]:  # shaded, so that a bar and its text are seen as one row
        parts.append(_rect(_MARGIN - 8, lane.y - _LANE / 2, width - 2 * _MARGIN + 16, _STRIPE, height=_LANE, rx=0))
    for iteration in _round_numbers(max(1, total_steps)):
        parts.append(_path(f"M{x(iteration):.1f} {_FIRST_LANE - 4}V{bottom:g}", _GRID))
        parts.append(_text(x(iteration), _FIRST_LANE - 10, f"{iteration:,}", fill=_FAINT, anchor="middle"))
    for lane in lanes:
        if lane.parent_y is not None:
            down = f"M{x(lane.begin):.2f} {lane.parent_y + _BAR / 2:g}V{lane.y:g}"
            parts.append(_path(down, _LINE, kind="connector"))
    for lane in lanes:
        row, left = lane.row, min(x(lane.begin), _MARGIN + _PLOT_WIDTH - 2)  # keeps a stage of a single step visible
        fill = _UNKNOWN if pd.isna(row["saved"]) else depth_colour(row["saved"] / (most_saved or 1.0), _SCALE)
        parts.append(
            _rect(left, lane.y - _BAR / 2, max(2.0, x(row["known_until"]) - left), fill, stage=row["stage"],
                  tooltip=_tooltip(row))
        )  # fmt: skip
        ticks = sorted({round(x(step) / _TICK_STEP) * _TICK_STEP for step in row["checkpoint_steps"]})
        if ticks:
            down = "".join(f"M{at:g} {lane.y + _BAR / 2:g}v3.5" for at in ticks)
            parts.append(_path(down, _TEXT, width=0.8, kind="checkpoints"))
        numbers = [
            str(len(row["trials"])),
            "" if pd.isna(row["saved"]) else percent(row["saved"]),
            "" if pd.isna(row[quality.name]) else value_text(row[quality.name], quality),
        ]
        parts += _row_of_texts(lane.y + 4, label_x + lane.indent, lane.label, numbers_x, numbers, widths)
    if len(folded):
        most = int(folded["trials"].map(len).max())
        rest = f"… and {plural(len(folded), 'more stage')}, each with {plural(most, 'trial')} at most"
        parts.append(_text(_MARGIN, bottom + 0.7 * _LANE, rest, fill=_FAINT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lanes(frame: pd.DataFrame, *, several: bool) -> Iterator[_Lane]:
    """Yield the lanes from top to bottom: each stage above its children, the latest child first.

    With several trees, the labels of their root stages have the tree's id.
    """
    children: dict[Any, list[Mapping[Any, Any]]] = {}
    for found in frame.fillna({"begin": 0}).to_dict("records"):
        children.setdefault(found["parent"] if found["depth"] > 0 else None, []).append(found)
    for leaving in children.values():
        leaving.sort(key=lambda row: (row["begin"], len(row["trials"])))  # taken from the end of the list
    heights: dict[str, float] = {}
    waiting = children.get(None, [])
    while waiting:
        row = waiting.pop()
        y = _FIRST_LANE + _LANE * (len(heights) + 0.5)
        heights[row["stage"]] = y
        words = _action(row) + (f" {row['root'][:8]}" if several and row["depth"] == 0 else "")
        yield _Lane(
            row=row,
            begin=int(row["begin"]),
            label=words if len(words) <= _MOST_LETTERS else words[: _MOST_LETTERS - 1] + "…",
            indent=_INDENT * min(int(row["depth"]), _MOST_INDENTS),
            y=y,
            parent_y=heights[row["parent"]] if row["depth"] > 0 else None,
        )
        waiting += children.get(row["stage"], [])


def _action(row: Mapping[Any, Any]) -> str:
    return f"{row['begin']}: {row['action']}" if row["depth"] > 0 else str(row["action"])


def _tooltip(row: Mapping[Any, Any]) -> str:
    counts = f"{plural(len(row['trials']), 'trial')}, {plural(row['checkpoints'], 'checkpoint')}"
    return f"{_action(row)}, to {row['known_until']}; {counts}"


def _head(width: int, height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        "role=\"img\" font-family=\"-apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Verdana, sans-serif\" "
        'font-size="11">',
        f"<title>{_clean(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 32, title, size=17, weight="600"),
        _text(_MARGIN, 52, "One bar a stretch of training; what trials have in common was trained once.", fill=_FAINT),
    ]


def _legend(saved: str, most_saved: float) -> list[str]:
    """Return the legend line under the title: colour scale, meaning of grey, tick of a checkpoint."""
    y, x = 70.0, float(_MARGIN)
    stops = "".join(
        f'<stop offset="{place / (len(_SCALE) - 1):.2f}" stop-color="{colour}"/>' for place, colour in enumerate(_SCALE)
    )
    some = most_saved > 0
    bar = _LETTER * (len(saved) + len(": 0 %")) + 1.4
    words = f"{percent(most_saved) if some else '0 %'} by the run that ends here"
    grey_x = x + bar + 86 + _LETTER * (len(words) + 2)
    tick_x = grey_x + 24 + _LETTER * 22
    return [
        f'<defs><linearGradient id="stage-tree-saved">{stops}</linearGradient></defs>',
        _text(x, y, f"{saved}: 0 %" if some else f"{saved}:", fill=_FAINT),
        _rect(x + bar, y - 9, 80, "url(#stage-tree-saved)" if some else _SCALE[0]),
        _text(x + bar + 86, y, words, fill=_FAINT),
        _rect(grey_x, y - 9, 18, _UNKNOWN),
        _text(grey_x + 24, y, "not trained to the end", fill=_FAINT),
        _path(f"M{tick_x:.1f} {y - 6}v6", _TEXT, width=1.2),
        _text(tick_x + 6, y, "checkpoint", fill=_FAINT),
    ]


def _round_numbers(total: int, most: int = 7) -> list[int]:
    """Return at most ``most`` + 1 round numbers from 0, and the total if there is room for its label.

    >>> _round_numbers(300)
    [0, 50, 100, 150, 200, 250, 300]
    >>> _round_numbers(480)
    [0, 100, 200, 300, 400, 480]
    """
    step, place = 1, 0
    while total / step > most:
        place += 1
        step = (1, 2, 5)[place % 3] * 10 ** (place // 3)
    numbers = list(range(0, total + 1, step))
    return numbers if total - numbers[-1] < 0.09 * total else [*numbers, total]


def _row_of_texts(
    y: float, label_x: float, label: str, numbers_x: float, cells: Sequence[str], widths: Mapping[str, int],
    fill: str = _TEXT,
) -> list[str]:  # fmt: skip
    """Return a label and the cells of the columns of numbers, without empty ones."""
    right = [numbers_x + end for end in accumulate(widths.values())]
    numbers = [_text(x, y, cell, fill=fill, anchor="end") for x, cell in zip(right, cells, strict=True) if cell]
    return [_text(label_x, y, label, fill=fill), *numbers]


def _rect(
    x: float, y: float, width: float, fill: str, *, height: float = _BAR, rx: int = 2, stage: str = "",
    tooltip: str = "",
) -> str:  # fmt: skip
    of = f' class="stage" data-stage={quoteattr(stage)}' if stage else ""
    return f'<rect{of} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height}" rx="{rx}" fill="{fill}">' + (
        f"<title>{_clean(tooltip)}</title></rect>" if tooltip else "</rect>"
    )


def _path(d: str, stroke: str, *, width: float = 1, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<path{of} d="{d}" stroke="{stroke}" stroke-width="{width:g}" fill="none"/>'


def _text(
    x: float, y: float, words: str, *, fill: str = _TEXT, size: int | None = None, weight: str = "", anchor: str = ""
) -> str:
    more = f' font-size="{size}"' if size else ""
    more += f' font-weight="{weight}"' if weight else ""
    more += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{more}>{_clean(words)}</text>'


def _clean(words: str) -> str:
    """Escape text for XML; characters that are not printable become the replacement character."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in words))
