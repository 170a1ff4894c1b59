"""Columns of the frames of this package: order, nullable dtypes, and their descriptions in `df.attrs`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.metrics.saving import quality_of
from trainables.config import field_kinds
from trainables.metrics import METRICS, metrics_of, row_metrics
from trainables.quality import ACCURACY, Quality

#: Columns that identify the trial of a row.
IDENTITY: dict[str, str] = {
    "trial": "int64",
    "role": "string",
    "status": "string",
    "error": "string",
    "control": "string",
    "candidate": "Int64",
    "options": "string",
    "of_epochs": "Int64",
}
#: Nullable pandas dtypes of hyperparameters by their plain type. Lists are JSON.
_BY_KIND = {str: "string", tuple: "string", bool: "boolean", int: "float64", float: "float64"}
#: Hyperparameters that every trial has: integers, unless a value is unknown.
_ALWAYS = ("epochs", "seed", "threads")


def row_dtypes(quality: Quality = ACCURACY, further: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns that trials of a metric report, in order, with their dtypes; ``further`` ones after it."""
    found = {}
    for name, metric in row_metrics(quality).items():
        found[name] = metric.dtype
        if name == quality.test:
            found |= dict.fromkeys(further, "float64")
    return found


def further_names(rows: Iterable[Mapping[str, object]], quality: Quality) -> list[str]:
    """Return the further metrics of named rows (`trainables.metrics.named_row`), in the order of their appearance.

    Texts are none, but columns of an earlier version.
    """
    known = {*metrics_of(quality), *IDENTITY, *field_kinds(), "run_facts"}
    named = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, str))
    return [name for name in named if name not in known]


def trial_dtypes(quality: Quality = ACCURACY, further: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns of a frame of trials as `row_dtypes`, without those relative to the baseline."""
    config = {name: _BY_KIND[kind] for name, kind in field_kinds().items()}
    return {**IDENTITY, **row_dtypes(quality, further), **config}


def typed(frame: pd.DataFrame, dtypes: Mapping[str, str]) -> pd.DataFrame:
    """Return the named columns in this order and with these dtypes; a column that the frame lacks is all missing.

    A column of integers with a missing value is ``Int64``.
    """
    columns, found = {}, {}
    for name, dtype in dtypes.items():
        column = frame[name] if name in frame.columns else pd.Series(None, index=frame.index, dtype="object")
        missing = column.isna().any()
        if missing and dtype == "int64":
            dtype = "Int64"
        columns[name], found[name] = column, "int64" if name in _ALWAYS and not missing else dtype
    return pd.DataFrame(columns, index=frame.index).astype(found)


class Descriptions(dict[str, dict[str, Any]]):
    """Descriptions of columns; pandas deep-copies ``attrs`` at each access to a column, and these never change."""

    def __deepcopy__(self, memo: Any) -> Descriptions:
        """Return itself."""
        return self


def described(frame: pd.DataFrame) -> pd.DataFrame:
    """Store unit, direction and meaning of each result column in ``frame.attrs["columns"]``; return the frame."""
    known = metrics_of(quality_of(frame)) if "metric" in frame.columns else METRICS
    frame.attrs["columns"] = Descriptions(
        (name, {"unit": known[name].unit, "direction": known[name].direction, "meaning": known[name].meaning})
        for name in frame.columns
        if name in known
    )
    return frame
