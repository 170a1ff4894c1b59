"""The section of the page on samples that a generator draws, epoch by epoch. Empty for studies without them."""

from __future__ import annotations

import base64
import binascii
from html import escape
from typing import Any

import pandas as pd

from analysis.presentation.figures.gradient_noise import shown_trial
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.html.elements import Markup, small_table
from analysis.quality_words import value_text

#: Most epochs of a trial that are shown, evenly spread.
_MOST_EPOCHS = 8
#: Enlargement of the pictures.
_FACTOR = 2
_PNG = b"\x89PNG\r\n\x1a\n"
_SAMPLES = (
    "Samples from the same noise after some of a trial's epochs: of the baseline, and of the trial that the report "
    "shows."
)
COLLAPSED = "discriminator_collapsed"


def sample_pictures(data: ReportData) -> str:
    """Return the section on samples and on collapsed discriminators."""
    rows = data.history
    if rows is None or "sample_picture" not in rows.columns:
        return ""
    rows = rows[rows["sample_picture"].map(lambda text: bool(_png(text)))]
    if rows.empty:
        return ""
    baselines = data.trials.loc[data.trials["role"] == "baseline", "trial"]
    chosen = [*baselines.head(1), shown_trial(data, rows)]
    shown = [int(trial) for trial in dict.fromkeys(chosen) if trial is not None and (rows["trial"] == trial).any()]
    table = [
        (f"{trial}{' (baseline)' if trial in set(baselines) else ''}", _pictures(rows[rows["trial"] == trial], data))
        for trial in shown
    ]
    warning = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in collapsed(rows))
    return f"<p>{escape(_SAMPLES)}</p>{warning}" + small_table("Samples by trial", ("trial", "samples"), table)


def collapsed(rows: pd.DataFrame) -> list[str]:
    """Return a line on each trial whose discriminator had collapsed after an epoch.

    Args:
        rows: of `analysis.history`.

    >>> collapsed(pd.DataFrame({"trial": [3, 3, 4], "epoch": [1, 2, 1], "discriminator_collapsed": [1.0, 1.0, 0.0]}))
    ['The discriminator of trial 3 had collapsed after epoch 1, 2.']
    """
    if COLLAPSED not in rows.columns:
        return []
    told = rows[pd.to_numeric(rows[COLLAPSED], errors="coerce") > 0]
    return [
        f"The discriminator of trial {trial} had collapsed after epoch {', '.join(map(str, group['epoch']))}."
        for trial, group in told.groupby("trial")
    ]


def _pictures(rows: pd.DataFrame, data: ReportData) -> Markup:
    places = sorted({round(k * (len(rows) - 1) / (_MOST_EPOCHS - 1)) for k in range(_MOST_EPOCHS)})
    items = [_item(row, data) for row in rows.sort_values("epoch").iloc[places].to_dict("records")]
    return Markup(f'<ul class="samples">{"".join(items)}</ul>')


def _item(row: dict[Any, Any], data: ReportData) -> str:
    picture = _png(row["sample_picture"])
    width, height = (_FACTOR * int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    quality = data.quality
    value = row.get(quality.name)
    words = "" if value is None or value != value else f", {quality.name} {value_text(value, quality)}"
    alt = escape(f"samples after epoch {row['epoch']}{words}")
    source = base64.b64encode(picture).decode()
    return (
        f'<li><img alt="{alt}" title="{alt}" width="{width}" height="{height}" src="data:image/png;base64,{source}">'
        f"<small>epoch {int(row['epoch'])}{escape(words)}</small></li>"
    )


def _png(text: Any) -> bytes:
    """Return the picture in a cell; empty where there is none, whatever a study's file holds."""
    try:
        found = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
    return found if found.startswith(_PNG) and len(found) >= 24 else b""
