"""Trials that trained what an earlier one trained. Pure.

A *duplicate* trained what an earlier completed trial of the same table trained: it ended in the same stage of the
stage tree, or its seed and hyperparameters are equal. A setting left out and the same value given explicitly differ as
hyperparameters, so without a tree they do not count as duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.config import field_names


def duplicate_of(done: pd.DataFrame) -> pd.arrays.IntegerArray:
    """For each trial the number of the earliest one that trained the same, NA for that one itself."""
    order = np.argsort(done["trial"].to_numpy(), kind="stable")
    first = np.arange(len(done))
    by_age = done if (order == first).all() else done.iloc[order]
    for codes in (_stage_codes(by_age), _setting_codes(by_age)):
        _, earliest, group = np.unique(codes, return_index=True, return_inverse=True)
        first = np.where(codes < 0, first, np.minimum(first, earliest[group]))
    while (first[first] != first).any():
        first = first[first]  # what equals by its settings a trial that equals another by its stage
    numbers = np.empty(len(done), dtype="int64")
    same = np.empty(len(done), dtype=bool)
    numbers[order] = by_age["trial"].to_numpy()[first]
    same[order] = first != np.arange(len(done))
    return pd.arrays.IntegerArray(numbers, ~same)


def _stage_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """A number for each stage in which trials ended, -1 where none is known."""
    if "stage" not in trials.columns:
        return np.full(len(trials), -1)
    stages = trials["stage"].astype("object")
    known = (stages.notna() & (stages != "")).to_numpy(dtype=bool)
    return np.where(known, _group_codes(trials, ["stage"]), -1)


def _setting_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """A number for each set of hyperparameters; all -1 in a table without them."""
    names = [name for name in field_names() if name in trials.columns]
    if "method" not in names:  # a table of a few columns: a seed alone does not make trials equal
        return np.full(len(trials), -1)
    return _group_codes(trials, names)


def _group_codes(trials: pd.DataFrame, names: Sequence[str]) -> NDArray[np.int64]:
    """A number for each combination of values, missing ones equal to each other; never across studies."""
    codes = np.zeros(len(trials), dtype="int64")
    for name in [*names, *({"study"} & set(trials.columns))]:
        if trials[name].isna().all():
            continue
        own, levels = pd.factorize(trials[name], use_na_sentinel=False)
        if len(levels) > 1:
            codes = pd.factorize(codes * len(levels) + own)[0].astype("int64")
    return codes
