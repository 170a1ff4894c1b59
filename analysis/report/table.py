"""The table of all trials, as the page takes it: columns with their kinds, rows of plain values. Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from analysis.accounting import search_fraction
from analysis.controls import beats_shorter, control_line
from analysis.report.columns import numbers, percent_values, plain, texts
from analysis.report.data import ReportData
from analysis.report.figures import short_name
from trainables.config import field_kinds

#: Result columns: name in the frame, heading, what it is, digits behind the point. Fractions are shown times 100.
_RESULTS = (
    ("accuracy", "accuracy %", "validation accuracy, percent", 2),
    ("accuracy_drop", "drop", "baseline's validation accuracy minus the trial's, in points", 2),
    ("compute_saved", "saved %", "compute saved, percent of the full budget's FLOPs", 1),
    ("backward_saved", "backward %", "backward FLOPs saved, percent", 1),
    ("communication_saved", "commun. %", "gradient bytes saved, percent", 1),
    ("time_saved", "time %", "training time saved, percent; one measurement beside other trials", 1),
    ("peak_memory_saved", "memory %", "peak memory saved, percent", 1),
    ("test_accuracy", "test %", "test accuracy, percent; no choice was made by it", 2),
)
#: Hyperparameters that are said elsewhere, or say nothing of a setting.
_ELSEWHERE = ("workload",)
#: Letters of an error in the table; the section of failed trials has all of it.
_MOST_LETTERS = 120


def trial_table(data: ReportData) -> dict[str, Any]:
    """Columns and rows of the table.

    Returns:
        ``columns``: dicts of key, label, title, kind (``number`` or ``text``) and digits (None: as it is); ``rows``:
        lists of values in that order, None where there is none.
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
    add("status", "status", "how it ended", texts(trials, "status"), "text")
    for name, label, title, digits in _RESULTS:
        found = numbers(trials, name)
        if np.isfinite(found).any():
            add(name, label, title, percent_values(found), digits=digits)
    cost = np.asarray(search_fraction(trials), dtype=np.float64)
    if np.isfinite(cost).any():
        title = "compute that the search executed for it, in trainings without the method"
        add("search_cost", "search cost", title, [round(float(v), 6) for v in cost], digits=2)
    beats = [None if pd.isna(b) else "yes" if b else "no" for b in beats_shorter(trials, control_line(trials))]
    if any(beats):
        title = "whether it is more accurate than simply training shorter for the same compute"
        add("beats_shorter", "beats shorter", title, beats, "text")
    for name, kind in field_kinds().items():
        if name not in _ELSEWHERE and name in trials.columns and trials[name].dropna().nunique() > 1:
            add(name, short_name(name), name, *_setting(trials, name, kind))
    errors = [error if len(error) <= _MOST_LETTERS else f"{error[:_MOST_LETTERS]}…" for error in texts(trials, "error")]
    if any(errors):
        add("error", "error", "what went wrong", errors, "text")
    return {"columns": columns, "rows": plain([list(row) for row in zip(*values, strict=True)])}


def _roles(trials: pd.DataFrame) -> list[str]:
    controls = texts(trials, "control")
    return [
        f"{role}: {control}" if control else role for role, control in zip(texts(trials, "role"), controls, strict=True)
    ]


def _setting(trials: pd.DataFrame, name: str, kind: type) -> tuple[list[Any], str]:
    """A hyperparameter's values and their kind."""
    if kind in (int, float):
        found = numbers(trials, name)
        return [None if np.isnan(v) else int(v) if kind is int else float(f"{v:.6g}") for v in found], "number"
    return [_listed(text) for text in texts(trials, name)], "text"


def _listed(text: str) -> str:
    """A list as the variables take it, other text as it is."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return ",".join(map(str, found)) if isinstance(found, list) else text
