"""The stage tree as a picture: a self-contained SVG with one lane per stage. Pure: a frame in, text out.

A bar covers the iterations of its stage and is connected by a thin line to its parent's bar. The children of a stage
are drawn latest first, so that no line crosses a bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from analysis.formatting import percent, plural
from analysis.metrics.saving import TRAINING, saved_words
from analysis.presentation.stage_frame import most_visited

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
_NUMBERS = (("trials", 58), ("saved", 64), ("accuracy", 70))
_TICK_STEP = 0.5  # checkpoints closer together share one tick

_TEXT, _FAINT, _LINE, _GRID, _STRIPE, _UNKNOWN = "#1f2933", "#52606d", "#8491a0", "#d9dee3", "#f5f7f9", "#aab4be"
#: From nothing saved to the most saved; all contrast with the background, and with each other also in grey print.
_SCALE = ((127, 205, 187), (65, 182, 196), (29, 145, 192), (34, 94, 168), (12, 44, 132))


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """Position of a stage in the picture."""

    row: Mapping[Any, Any]
    """Its row of the frame."""
    begin: int
    """The iteration at which it branches off its parent, 0 for a root stage."""
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
    lanes = list(_lanes(drawn))
    said = saved_words(frame.attrs.get("saving", TRAINING))
    scale = _Scale(total_steps=max(1, total_steps), most_saved=_most_saved(drawn), said=said)
    several = frame["root"].nunique() > 1
    labels = [_label(lane.row, several) for lane in lanes]
    indented = [
        _LETTER * len(label) + _INDENT * min(int(lane.row["depth"]), _MOST_INDENTS)
        for label, lane in zip(labels, lanes, strict=True)
    ]
    label_width = max(_LETTER * len(_LABELS), *indented)
    label_x = _MARGIN + _PLOT_WIDTH + 24
    numbers_x = label_x + label_width
    width = round(numbers_x + sum(wide for _, wide in _NUMBERS) + _MARGIN)
    bottom = _FIRST_LANE + _LANE * len(lanes)
    height = bottom + (_LANE if len(folded) else 0) + _MARGIN // 2
    if title is None:
        title = plural(len({trial for trials in frame["trials"] for trial in trials}), "trial")
    parts = [
        *_head(width, height, title),
        *_legend(scale),
        *_columns(label_x, numbers_x),
        *_stripes(lanes, width),
        *_axis(scale, bottom),
        *(_connector(lane, scale) for lane in lanes if lane.parent_y is not None),
    ]
    for lane, label in zip(lanes, labels, strict=True):
        parts += _stage(lane, scale)
        parts += _words(lane, label, label_x, numbers_x)
    if len(folded):
        parts.append(_text(_MARGIN, bottom + 0.7 * _LANE, _folded_words(folded), fill=_FAINT))
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Mapping of iterations to pixels and of savings to colours."""

    total_steps: int
    """Iterations of a whole run."""
    most_saved: float
    """The saving shown in the darkest colour, a fraction; 0 if nothing is saved."""
    said: str
    """Name of the saving, in words."""

    def x(self, iteration: float) -> float:
        return _MARGIN + _PLOT_WIDTH * min(max(iteration / self.total_steps, 0.0), 1.0)

    def colour(self, saved: float | None) -> str:
        if saved is None or pd.isna(saved):
            return _UNKNOWN
        part = saved / self.most_saved if self.most_saved > 0 else 0.0
        place = min(max(part, 0.0), 1.0) * (len(_SCALE) - 1)
        below = min(int(place), len(_SCALE) - 2)
        mixed = (a + (place - below) * (b - a) for a, b in zip(_SCALE[below], _SCALE[below + 1], strict=True))
        return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


def _most_saved(frame: pd.DataFrame) -> float:
    most = frame["saved"].max()
    return float(most) if most > 0 else 0.0


def _lanes(frame: pd.DataFrame) -> Iterator[_Lane]:
    """Yield the lanes from top to bottom: each stage above its children, the latest child first."""
    children: dict[Any, list[Mapping[Any, Any]]] = {}
    for found in frame.to_dict("records"):
        children.setdefault(found["parent"] if found["depth"] > 0 else None, []).append(found)
    for leaving in children.values():
        leaving.sort(key=lambda row: (_begin(row), len(row["trials"])))  # taken from the end of the list
    heights: dict[str, float] = {}
    waiting = children.get(None, [])
    while waiting:
        row = waiting.pop()
        y = _FIRST_LANE + _LANE * (len(heights) + 0.5)
        heights[row["stage"]] = y
        yield _Lane(row=row, begin=_begin(row), y=y, parent_y=heights[row["parent"]] if row["depth"] > 0 else None)
        waiting += children.get(row["stage"], [])


def _begin(row: Mapping[Any, Any]) -> int:
    return 0 if pd.isna(row["begin"]) else int(row["begin"])


def _label(row: Mapping[Any, Any], several: bool) -> str:
    if row["depth"] > 0:
        words = f"{row['begin']}: {row['action']}"
    else:
        words = f"{row['action']} {row['root'][:8]}" if several else str(row["action"])
    return words if len(words) <= _MOST_LETTERS else words[: _MOST_LETTERS - 1] + "…"


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


def _legend(scale: _Scale) -> list[str]:
    """Return the legend line under the title: colour scale, meaning of grey, tick of a checkpoint."""
    y, x = 70.0, float(_MARGIN)
    stops = "".join(
        f'<stop offset="{place / (len(_SCALE) - 1):.2f}" stop-color="#{r:02x}{g:02x}{b:02x}"/>'
        for place, (r, g, b) in enumerate(_SCALE)
    )
    some = scale.most_saved > 0
    bar = _LETTER * (len(scale.said) + len(": 0 %")) + 1.4
    words = f"{percent(scale.most_saved) if some else '0 %'} by the run that ends here"
    fill = "url(#stage-tree-saved)" if some else scale.colour(0.0)
    parts = [
        f'<defs><linearGradient id="stage-tree-saved">{stops}</linearGradient></defs>',
        _text(x, y, f"{scale.said}: 0 %" if some else f"{scale.said}:", fill=_FAINT),
        f'<rect x="{x + bar:.1f}" y="{y - 9}" width="80" height="{_BAR}" rx="2" fill="{fill}"/>',
        _text(x + bar + 86, y, words, fill=_FAINT),
    ]
    x += bar + 86 + _LETTER * (len(words) + 2)
    parts += [
        f'<rect x="{x:.1f}" y="{y - 9}" width="18" height="{_BAR}" rx="2" fill="{_UNKNOWN}"/>',
        _text(x + 24, y, "not trained to the end", fill=_FAINT),
    ]
    x += 24 + _LETTER * 22
    parts += [
        f'<path d="M{x:.1f} {y - 6}v6" stroke="{_TEXT}" stroke-width="1.2"/>',
        _text(x + 6, y, "checkpoint", fill=_FAINT),
    ]
    return parts


def _columns(label_x: float, numbers_x: float) -> list[str]:
    y = _FIRST_LANE - 10
    parts = [
        _text(_MARGIN + _PLOT_WIDTH / 2, y - 19, "iteration", fill=_FAINT, anchor="middle"),
        _text(label_x, y, _LABELS, fill=_FAINT),
    ]
    x = numbers_x
    for name, wide in _NUMBERS:
        x += wide
        parts.append(_text(x, y, name, fill=_FAINT, anchor="end"))
    return parts


def _stripes(lanes: Sequence[_Lane], width: int) -> list[str]:
    """Shade every second lane, so that a bar and its text are seen as one row."""
    return [
        f'<rect x="{_MARGIN - 8}" y="{lane.y - _LANE / 2:g}" width="{width - 2 * _MARGIN + 16}" height="{_LANE}" '
        f'fill="{_STRIPE}"/>'
        for lane in lanes[::2]
    ]


def _axis(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for iteration in _round_numbers(scale.total_steps):
        x = scale.x(iteration)
        parts.append(f'<path d="M{x:.1f} {_FIRST_LANE - 4}V{bottom:g}" stroke="{_GRID}" stroke-width="1"/>')
        parts.append(_text(x, _FIRST_LANE - 10, f"{iteration:,}", fill=_FAINT, anchor="middle"))
    return parts


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


def _connector(lane: _Lane, scale: _Scale) -> str:
    assert lane.parent_y is not None
    x = scale.x(lane.begin)
    return (
        f'<path class="connector" d="M{x:.2f} {lane.parent_y + _BAR / 2:g}V{lane.y:g}" stroke="{_LINE}" '
        'stroke-width="1" fill="none"/>'
    )


def _stage(lane: _Lane, scale: _Scale) -> list[str]:
    """Return the bar of a stage, with its tooltip, and the ticks of its checkpoints."""
    row = lane.row
    left, right = scale.x(lane.begin), scale.x(row["known_until"])
    left = min(left, _MARGIN + _PLOT_WIDTH - 2)  # keeps a stage of a single step visible
    told = f"{row['begin']}: {row['action']}" if row["depth"] > 0 else row["action"]
    counts = f"{plural(len(row['trials']), 'trial')}, {plural(row['checkpoints'], 'checkpoint')}"
    told += f", to {row['known_until']}; {counts}"
    parts = [
        f'<rect class="stage" data-stage={quoteattr(row["stage"])} x="{left:.2f}" y="{lane.y - _BAR / 2:g}" '
        f'width="{max(2.0, right - left):.2f}" height="{_BAR}" rx="2" fill="{scale.colour(row["saved"])}">'
        f"<title>{_clean(told)}</title></rect>"
    ]
    places = sorted({round(scale.x(step) / _TICK_STEP) * _TICK_STEP for step in row["checkpoint_steps"]})
    if places:
        y = lane.y + _BAR / 2
        ticks = "".join(f"M{x:g} {y:g}v3.5" for x in places)
        parts.append(f'<path class="checkpoints" d="{ticks}" stroke="{_TEXT}" stroke-width="0.8"/>')
    return parts


def _words(lane: _Lane, label: str, label_x: float, numbers_x: float) -> list[str]:
    row = lane.row
    y = lane.y + 4
    indent = _INDENT * min(int(row["depth"]), _MOST_INDENTS)
    cells = {
        "trials": str(len(row["trials"])),
        "saved": "" if pd.isna(row["saved"]) else percent(row["saved"]),
        "accuracy": "" if pd.isna(row["accuracy"]) else f"{row['accuracy']:.4f}",
    }
    parts = [_text(label_x + indent, y, label)]
    x = numbers_x
    for name, wide in _NUMBERS:
        x += wide
        if cells[name]:
            parts.append(_text(x, y, cells[name], anchor="end"))
    return parts


def _folded_words(folded: pd.DataFrame) -> str:
    most = int(folded["trials"].map(len).max())
    return f"… and {plural(len(folded), 'more stage')}, each with {plural(most, 'trial')} at most"


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
