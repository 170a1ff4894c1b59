"""The ranked table for a terminal: one line a trial, within its width, no number cut. Pure: frames in, text out."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection
from typing import Any

import pandas as pd

from analysis.formatting import percent, plural, unit_of_drop, whole_percent
from analysis.metrics.over_seeds import CONFIDENCE
from analysis.metrics.ranking import on_average
from analysis.metrics.saving import quality_of
from analysis.presentation.figures.figure import stop_events
from analysis.presentation.settings_text import cut_words
from analysis.presentation.summary_text import DropWords, searched_options, settings_text, whole_run
from trainables.savings import SAVED

#: Rows, and characters that the words of a setting have at most and, where they are shown, at least.
ROWS, MOST, LEAST = 12, 30, 16
_GAP = "  "


def setting_words(row: pd.Series, most: int = MOST, others: Collection[str] = ()) -> str:
    """Return what a trial does in so many characters: ``24 ep, conv6 by 144`` if all up to conv6 stop by that step.

    Layers called ``others`` are shortened otherwise.

    >>> one = {"role": "search", "method": "gradskip", "epochs": 24, "of_epochs": 30}
    >>> event = '[{"iteration": 144, "name": "encoder.layer.0.output.dense.weight"}]'
    >>> setting_words(pd.Series({**one, "stop_events": event}), 22)
    '24 ep, ….0…ense by 144'
    >>> setting_words(pd.Series({**one, "stop_events": event.replace("144", "0"), "CAC_LR_FACTOR": 2.0}))
    '24 ep, ….0…dense frozen, lr x2'
    >>> setting_words(pd.Series({**one, "stop_events": '[{"iteration": 0, "name": "4.bias"}]'}))
    '24 ep, 4.bias frozen'
    >>> setting_words(pd.Series({**one, "CAC_NORM_STATISTICS": "hold_all"}))
    '24 ep, dense, held'
    """
    events = stop_events(row.get("stop_events"))
    begin = "".join(
        f"{part}, " for part in (f"{int(row['epochs'])} ep" if cut_words(row) else "", searched_options(row)) if part
    )
    held, factor = whole_run(row)
    alike = f"{', held' if held else ''}{'' if factor == 1 else f', lr x{factor:g}'}"
    if str(row["method"]) == "none":
        text = f"{begin}{'baseline' if row['role'] == 'baseline' else 'dense'}"
    elif row["role"] == "published":
        text = "published settings"
    elif str(row["method"]) == "gradskip" and (name := _layer_of(row)):
        when = events[-1]["iteration"]
        end = f"{' frozen' if when <= 0 else f' by {when}'}{alike}"
        text = f"{begin}{_shortened(name, most - len(begin) - len(end), others)}{end}"
    elif str(row["method"]) == "gradskip" and not events and alike:
        text = f"{begin}dense{alike}"
    else:
        text = settings_text(row)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _layer_of(row: pd.Series) -> str:
    """Return the name of the last layer that a trial stops; empty if it is not known.

    A number alone, as of a part of an `nn.Sequential`, would read as how many layers it stops.
    """
    events = stop_events(row.get("stop_events"))
    whole = str(events[-1].get("name") or "") if events else ""
    name = whole.removesuffix(".weight").removesuffix(".bias")
    return whole if name.isdigit() else name


def _shortened(name: str, room: int, others: Collection[str]) -> str:
    """Shorten a layer's name from its beginning, the number of its block last of all, and as no other one is.

    >>> [_shortened("bert.encoder.layer.3.output.LayerNorm", room, ()) for room in (40, 20, 18, 8)]
    ['bert.encoder.layer.3.output.LayerNorm', '….3.output.LayerNorm', '….3….LayerNorm', '….3…Norm']
    >>> _shortened("layer1.0.conv2", 10, ["layer2.0.conv2"])
    'l1.0.conv2'
    """
    taken = {form for other in others if other != name for form in _forms(other, room)}
    forms = _forms(name, room)
    return next((form for form in forms if form not in taken), forms[0])


def _forms(name: str, room: int) -> list[str]:
    """Return the forms of a layer's name that a room has, the best first; never none."""
    parts = name.split(".")
    number = max((place for place, part in enumerate(parts) if part.isdigit()), default=-1)
    block = f"….{parts[number]}…" if number >= 0 else "…"
    initials = [re.sub(r"^(.).*?(\d*)$", r"\1\2", part) for part in parts]
    left = room - len(block)
    forms = [
        name,
        *(f"….{'.'.join(parts[begin:])}" for begin in range(1, number + 1)),
        *(f"{block}.{'.'.join(parts[begin:])}" for begin in range(number + 2, len(parts))),
        f"{block}{parts[-1][-left:] if left > 0 else ''}",
        ".".join([*initials[:-1], parts[-1]]),
        ".".join(initials),
    ]
    return [form for form in forms if len(form) <= room] or [forms[-3]]


def terminal_table(
    ranking: pd.DataFrame, *, width: int, allowed_drop: float | str, answer: int | None = None,
    beats: pd.Series[Any] | None = None, most: int = ROWS,
) -> str:  # fmt: skip
    """Return the best rows of an `analysis.rank`, the baseline among them, in lines of at most ``width`` characters.

    Where a column does not fit the words of a setting become shorter, then the last columns are left out.

    Args:
        ranking: with at least one trial.
        width: of the terminal, characters.
        allowed_drop: as for `analysis.rank`.
        answer: number of the recommended trial.
        beats: from `analysis.beats_shorter`.
        most: rows, without the header.
    """
    quality = quality_of(ranking)
    rows = ranking.assign(beats=beats, **{name: on_average(ranking, name) for name in (SAVED, "time_saved")})
    baseline = rows["role"] == "baseline"
    others = rows[~baseline & (rows["trial"] != answer)]
    always = pd.concat([rows[baseline].head(1), rows[~baseline & (rows["trial"] == answer)]])
    rows = pd.concat([others.head(most - len(always)), always]).sort_index()
    words = DropWords(rows.iloc[0], allowed_drop)

    def change(row: Any) -> str:
        unknown = pd.isna(row[quality.drop])
        mark = " " if row["within_drop"] or unknown or row["role"] == "baseline" else "!"
        if (seeds := row.get("seeds")) is None or pd.isna(seeds):
            return words.change(float(row[quality.drop]), unit=False) + mark
        if math.isinf(row["drop_mean"]):
            return f"failed{mark}"
        ends = row["drop_low"], row["drop_high"]
        interval = "" if pd.isna(ends[0]) else f" ({words.range(*ends)})"
        return f"{words.change(float(row['drop_mean']), unit=False)}{interval}{mark}"

    def share(name: str) -> Callable[[Any], str]:
        return lambda row: "" if pd.isna(row.get(name)) else percent(row[name])

    unit = unit_of_drop(quality) or quality.name
    given = f"{unit} ({whole_percent(CONFIDENCE)}) " if "seeds" in rows else f"{unit} "
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("trial", lambda row: f"{row['trial']}{'*' if row['trial'] == answer else ' '}"),
        ("saved", share(SAVED)),
        (given, change),
        ("time", share("time_saved")),
        ("shorter", lambda row: "" if pd.isna(row["beats"]) else str(row["beats"])),
    ]
    found = [[name, *(cell(row) for _, row in rows.iterrows())] for name, cell in columns]
    changes = found[2][1:]
    if not any(found[-1][1:]):
        found.pop()
    used = [max(map(len, column)) for column in found]
    while len(found) > 1 and sum(used) + len(_GAP) * (len(used) - 1) > width:
        found.pop()
        used.pop()
    while len(found) > 3 and sum(used) + len(_GAP) * len(used) + LEAST > width:
        found.pop()
        used.pop()
    room = min(MOST, width - sum(used) - len(_GAP) * len(used))
    if room >= LEAST:
        layers = {_layer_of(row) for _, row in rows.iterrows()}
        found.insert(1, ["setting", *(setting_words(row, room, layers) for _, row in rows.iterrows())])
        used.insert(1, max(map(len, found[1])))
    lines = [
        _GAP.join(
            cell.ljust(size) if name == "setting" else cell.rjust(size)
            for (name, *_), cell, size in zip(found, line, used, strict=True)
        ).rstrip()
        for line in zip(*found, strict=True)
    ]
    left = len(ranking) - len(rows)
    legend = (
        "* the answer" if answer in set(rows["trial"]) else "",
        "! loses more than is allowed" if any(cell.endswith("!") for cell in changes) else "",
        f"{plural(left, 'trial')} more: report --all" if left else "",
    )
    return "\n".join([*lines, *textwrap.wrap("; ".join(part for part in legend if part), width)])
