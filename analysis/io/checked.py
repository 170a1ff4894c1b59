"""Checks and dtype conversion of a user's frame of trials: numbers as numbers, text as text, else a UserError.

A frame that went through a CSV file, a spreadsheet or other code may lack columns, hold categories, or numbers as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.metrics import METRICS
from trainables.quality import Quality

#: Only trials with equal values in these columns are compared with each other.
KEYS = ("study", "workload", "seed", "options")
#: Values of the column ``status`` that `analysis.load` gives.
STATUSES = ("completed", "failed", "pruned", "interrupted", "running")
_NUMBERS = frozenset({"trial", "candidate", "epochs"}) | {
    name for name, metric in METRICS.items() if metric.dtype != "string"
}


def plain(trials: pd.DataFrame, *, needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return a shallow copy with plain columns and without attributes.

    Attributes are left out because pandas would copy them at every access to a column.

    Args:
        trials: one row a trial.
        needed: columns that must exist.

    Raises:
        UserError: a needed column is missing, a column name occurs twice, a column of numbers holds text, or a status
            is not one of `STATUSES`.

    >>> plain(pd.DataFrame({"trial": ["0", "1"], "seed": pd.Categorical(["7", "8"])})).dtypes.astype(str).to_dict()
    {'trial': 'int64', 'seed': 'int64'}
    """
    twice = trials.columns[trials.columns.duplicated()]
    if len(twice):
        raise UserError(f"each column of the trials must be there once, {twice[0]!r} is there twice: rename one")
    if missing := [name for name in needed if name not in trials.columns]:
        raise UserError(
            f"the trials have no column {missing[0]!r}, this needs {', '.join(needed)}: load them with analysis.load, "
            "or rename your own columns"
        )
    trials = trials.copy(deep=False)
    trials.attrs = {}
    metrics = trials["metric"].dropna().unique() if "metric" in trials.columns else ()
    own = [Quality(name=str(name)) for name in metrics]
    numbers = _NUMBERS.union(*((one.name, one.test, one.drop, one.test_drop) for one in own))
    for name in trials.columns:
        if isinstance(trials[name].dtype, pd.CategoricalDtype):
            dtype: Any = trials[name].cat.categories.dtype
            nullable = {"i": "Int64", "u": "UInt64", "b": "boolean"}.get(dtype.kind, dtype)
            trials[name] = trials[name].astype(nullable if trials[name].isna().any() else dtype)
        if name in numbers and not pd.api.types.is_numeric_dtype(trials[name].dtype):
            found = pd.to_numeric(trials[name].astype("object"), errors="coerce")
            _check(trials[name], found.notna(), "numbers")
            trials[name] = found
    if "status" in trials.columns:
        _check(trials["status"], trials["status"].isin(STATUSES), ", ".join(STATUSES),
               ": rename them, for trials of another status would not be ranked")  # fmt: skip
    if "seed" in trials.columns and not pd.api.types.is_numeric_dtype(trials["seed"].dtype):
        seeds = pd.to_numeric(trials["seed"].astype("object"), errors="coerce")
        if (seeds.notna() == trials["seed"].notna()).all():  # 7 and "7" are one seed; "a" and "b" stay text
            trials["seed"] = seeds
    return trials


def _check(column: pd.Series, is_right: pd.Series[bool], rule: str, way_out: str = "") -> None:
    wrong = column[column.notna() & ~is_right]
    if len(wrong):
        raise UserError(
            f"the column {column.name!r} must hold {rule}, got {wrong.iloc[0]!r} in row {wrong.index[0]}{way_out}"
        )


def is_value(trials: pd.DataFrame, name: str, value: str) -> pd.Series[bool]:
    """Return a mask of the rows with this value; False where the value or the whole column is missing."""
    if name not in trials.columns:
        return pd.Series(False, index=trials.index)
    return (trials[name] == value).fillna(False).astype(bool)


def numbers_of(trials: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return a column as float64, NaN where a value or the whole column is missing; exact for counts below 2^53."""
    if name not in trials.columns:
        return pd.Series(np.nan, index=trials.index, dtype="float64")
    return trials[name].astype("Float64").astype("float64")


def array_of(trials: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """Return `numbers_of` as an array."""
    return np.asarray(numbers_of(trials, name), dtype=np.float64)


def number_of(row: pd.Series, name: str) -> float:
    """Return a number of a row; NaN where it is missing."""
    value = row.get(name)
    return float("nan") if value is None or pd.isna(value) else float(value)


def group_codes(trials: pd.DataFrame, names: Sequence[str]) -> NDArray[np.int64]:
    """Return a number for each combination of values in these columns; missing values are equal to each other."""
    if not names:
        return np.zeros(len(trials), dtype="int64")
    return np.asarray(trials.groupby(list(names), dropna=False, sort=False, observed=True).ngroup(), dtype=np.int64)


def keys_of(trials: pd.DataFrame) -> list[str]:
    """Return the columns of `KEYS` that the trials have."""
    return [name for name in KEYS if name in trials.columns]


def check_distinct_trials(trials: pd.DataFrame) -> None:
    """Raise UserError where two trials have the same number and the same values in `KEYS`."""
    if "trial" not in trials.columns:
        return
    twice = trials.loc[trials.duplicated([*keys_of(trials), "trial"]), "trial"]
    if len(twice):
        raise UserError(
            f"trial {twice.iloc[0]} is there twice: rows of several studies need a column 'study' that tells them "
            "apart, as analysis.load([...]) adds it"
        )
