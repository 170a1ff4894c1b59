"""Columns of a frame of trials, read whether they are there or not, as numbers, masks and groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.errors import UserError

#: Only trials with equal values in these columns are compared with each other.
KEYS = ("study", "workload", "seed", "options")


def plain(trials: pd.DataFrame, *, needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return a shallow copy without attributes, which pandas would copy at every access to a column.

    UserError: a needed column is missing.
    """
    if missing := [name for name in needed if name not in trials.columns]:
        raise UserError(
            f"the trials have no column {missing[0]!r}, this needs {', '.join(needed)}: load them with analysis.load, "
            "or rename your own columns"
        )
    trials = trials.copy(deep=False)
    trials.attrs = {}
    return trials


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
    twice = trials.loc[trials.duplicated([*keys_of(trials), "trial"]), "trial"]
    if len(twice):
        raise UserError(
            f"trial {twice.iloc[0]} is there twice: rows of several studies need a column 'study' that tells them "
            "apart, as analysis.load([...]) adds it"
        )
