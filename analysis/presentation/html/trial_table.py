"""The page's table of all trials: columns with their kinds, rows of plain values. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import short_name
from analysis.io.checked import array_of
from analysis.metrics.accounting import search_fraction
from analysis.metrics.controls import CONTROL_NAMES, beats_shorter, control_line
from analysis.presentation.compression_text import WHOLE_FILES, field_text
from analysis.presentation.figures.plain_columns import plain, saved, texts
from analysis.presentation.figures.report_data import ReportData
from analysis.quality_words import drop_words, metric_words
from trainables.config import field_kinds
from trainables.quality import Quality
from trainables.savings import TIME, TRAINING

#: Result columns: name, heading, description, decimals. Fractions are shown as percentages.
_COMPUTE = ("compute_saved", "saved %", "compute saved, percent of the full budget's FLOPs", 1)
#: Columns of compute saved and sparsity for a study that does not rank by training compute.
_INFERENCE = (
    ("saved", "saved %", "{}, percent", 1),
    ("inference_saved", "inference %", "multiply-adds saved at inference, percent of the model's as it was built", 1),
    ("sparsity", "sparsity %", "zeros among the weights of convolutions and linear layers, percent", 1),
    ("structured_sparsity", "structured %", "of these weights in whole filters, rows or channels of zeros, percent", 1),
    ("compute_saved", "training %", "training compute saved, percent of the full budget's FLOPs", 1),
)
_OTHERS = (
    ("backward_saved", "backward %", "backward FLOPs saved, percent", 1),
    ("communication_saved", "commun. %", "gradient bytes saved, percent", 1),
    ("time_saved", "time %", "training time saved, percent; one measurement beside other trials", 1),
    ("peak_memory_saved", "memory %", "peak memory saved, percent", 1),
)
_LATENCY = (
    "latency_s", "latency ms",
    "median time of a batch through the model from which structures were removed, milliseconds", 2,
)  # fmt: skip
_COST = ("search_cost", "search cost", "compute that the search executed for it, in full trainings of the baseline", 2)
#: Factors of the values that are not fractions.
_FACTORS = {"latency_s": 1000.0, "search_cost": 1.0}
#: Hyperparameters that are shown elsewhere or are not part of a setting.
_ELSEWHERE = ("workload", "unnamed", *WHOLE_FILES)
#: Maximum characters of an error in the table; the section of failed trials shows it in full.
_MOST_LETTERS = 120


def trial_table(data: ReportData) -> dict[str, Any]:
    """Return the columns and rows of the table.

    Returns:
        ``columns``: dicts with key, label, title, kind (``number`` or ``text``) and digits (None: unrounded); ``rows``:
        lists of values in the order of the columns, None for a missing value.
    """
    trials = data.trials
    columns: list[dict[str, Any]] = []
    values: list[list[Any]] = []

    def add(
        key: str, label: str, title: str, found: list[Any], kind: str = "number", digits: int | None = None
    ) -> None:
        columns.append({"key": key, "label": label, "title": title, "kind": kind, "digits": digits})
        values.append(found)

    rank_of = dict(zip(data.ranking.get("trial", ()), data.ranking.get("rank", ()), strict=True))
    add("trial", "trial", "number of the trial", [int(t) for t in trials["trial"]])
    add("rank", "rank", "place in the ranking", [rank_of.get(trial) for trial in trials["trial"]])
    add("role", "role", "baseline, published defaults, search or control", _roles(trials), "text")
    if "baseline" in data.ranking:
        numbers = dict(zip(data.ranking["trial"], data.ranking["baseline"], strict=True))
        compared = [numbers.get(trial, pd.NA) for trial in trials["trial"]]
        title = "trial of the same options that it is compared with"
        add("baseline", "baseline", title, [None if pd.isna(number) else int(number) for number in compared])
    add("status", "status", "how it ended", texts(trials, "status"), "text")

    of_training = data.saving == TRAINING
    compute = (_COMPUTE,) if of_training else _INFERENCE[:1] if data.saving == TIME else _INFERENCE
    results = trials.assign(saved=saved(trials), search_cost=search_fraction(trials))
    measured, tested = _metric_columns(data.quality)
    others = (*compute, *_OTHERS, tested, *(() if of_training else (_LATENCY,)), _COST)
    scale = 100.0 if data.quality.is_fraction else 1.0
    factors = {name: scale for name, *_ in (*measured, tested)} | _FACTORS
    for name, label, title, digits in (*measured, *others):
        found = array_of(results, name) * factors.get(name, 100.0)
        if np.isfinite(found).any():
            shown = [round(float(value), 6) + 0.0 for value in found]  # adding 0.0 turns -0.0 into 0.0
            add(name, label, title.format(data.saved_words), shown, digits=digits)
    beats = [None if pd.isna(b) else str(b) for b in beats_shorter(trials, control_line(trials))]
    if any(beats):
        title = "whether it is better than a dense run cut to the same compute"
        add("beats_shorter", "beats cut dense run", title, beats, "text")
    for name, kind in field_kinds().items():
        if name not in _ELSEWHERE and name in trials.columns and trials[name].dropna().nunique() > 1:
            add(name, short_name(name), name, *_setting(trials, name, kind))
    errors = [error if len(error) <= _MOST_LETTERS else f"{error[:_MOST_LETTERS]}…" for error in texts(trials, "error")]
    if any(errors):
        add("error", "error", "what went wrong", errors, "text")
    return {"columns": columns, "rows": plain([list(row) for row in zip(*values, strict=True)])}


_Column = tuple[str, str, str, int | None]


def _metric_columns(quality: Quality) -> tuple[tuple[_Column, _Column], _Column]:
    """Return the columns of the metric and its drop, and that of the test split: name, heading, description, digits."""
    if quality.is_fraction:
        name, drop, digits, unit = f"{quality.name} %", "in points", 2, ", percent"
    else:
        name, drop, digits, unit = quality.name, quality.unit, None, f", {quality.unit}" if quality.unit else ""
    lost = f"how much worse than the baseline's{', ' if drop else ''}{drop}"
    tested = "test %" if quality.is_fraction else quality.test
    return (
        (
            (quality.name, name, f"{metric_words(quality)} on the validation split{unit}", digits),
            (quality.drop, drop_words(quality), lost, digits),
        ),
        (quality.test, tested, f"{quality.name} on the test split{unit}; no choice was made by it", digits),
    )


def _roles(trials: pd.DataFrame) -> list[str]:
    controls = texts(trials, "control")
    return [
        f"{role}: {CONTROL_NAMES.get(control, control)}" if control else role
        for role, control in zip(texts(trials, "role"), controls, strict=True)
    ]


def _setting(trials: pd.DataFrame, name: str, kind: type) -> tuple[list[Any], str]:
    """Return a hyperparameter's values and their kind."""
    if kind in (int, float):
        found = array_of(trials, name)
        return [None if np.isnan(v) else int(v) if kind is int else float(f"{v:.6g}") for v in found], "number"
    return [field_text(name, text) for text in texts(trials, name)], "text"
