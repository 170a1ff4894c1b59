"""Trials that trained what an earlier one trained: what is one outcome, and what a verdict on it speaks for. Pure.

A *duplicate* trained what an earlier completed trial of the same table trained. Any of these says so:

- it ended in the same stage of the stage tree;
- its seed and hyperparameters are equal;
- on the same workload, seed and number of epochs it reported the same training loss, accuracies and FLOPs, to the last
  bit, as two settings do that stop the same layers at the same iterations; where no training loss is known, as of many
  scripts, the same stops, at least one, accuracies and FLOPs.

Trials of one *outcome* are one setting in all but name: one of them is a candidate for confirmation, and what fresh
seeds say of it is said of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.config import field_names

#: What two trainings have in common only if they were the same, beside `_evidence`.
_RESULT = ("accuracy", "test_accuracy", "executed_flops", "backward_flops", "sparsity")
#: Without which results say nothing of each other.
_SETTING = ("workload", "seed", "epochs")


def duplicate_of(done: pd.DataFrame) -> pd.arrays.IntegerArray:
    """For each trial the number of the earliest one that trained the same, NA for that one itself."""
    order = np.argsort(done["trial"].to_numpy(), kind="stable")
    first = np.arange(len(done))
    by_age = done if (order == first).all() else done.iloc[order]
    for codes in (_stage_codes(by_age), _setting_codes(by_age), _result_codes(by_age)):
        _, earliest, group = np.unique(codes, return_index=True, return_inverse=True)
        first = np.where(codes < 0, first, np.minimum(first, earliest[group]))
    while (first[first] != first).any():
        first = first[first]  # what equals by its settings a trial that equals another by its stage
    numbers = np.empty(len(done), dtype="int64")
    same = np.empty(len(done), dtype=bool)
    numbers[order] = by_age["trial"].to_numpy()[first]
    same[order] = first != np.arange(len(done))
    return pd.arrays.IntegerArray(numbers, ~same)


def outcomes(ranking: pd.DataFrame) -> pd.Series[int]:
    """For each row of a ranking the number of the trial that its outcome is named after: the earliest of it."""
    if "duplicate_of" not in ranking.columns:
        return ranking["trial"]
    return ranking["duplicate_of"].fillna(ranking["trial"]).astype("int64")


def outcome_of(row: pd.Series) -> int:
    """The same of one row."""
    earlier = row.get("duplicate_of")
    return int(row["trial"] if earlier is None or pd.isna(earlier) else earlier)


def _stage_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """A number for each stage in which trials ended, -1 where none is known."""
    if "stage" not in trials.columns:
        return np.full(len(trials), -1)
    stages = trials["stage"].astype("object")
    known = (stages.notna() & (stages != "")).to_numpy(dtype=bool)
    return np.where(known, _group_codes(trials, ["stage"]), -1)


def _setting_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """A number for each set of hyperparameters; all -1 in a table without them."""
    names = list(field_names())
    if not set(names) <= set(trials.columns):  # another's table, or a few columns: a seed alone makes no trials equal
        return np.full(len(trials), -1)
    return np.where(trials["method"].notna(), _group_codes(trials, names), -1)


def _result_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """A number for each result, -1 where it proves nothing."""
    if not {"train_loss", "accuracy", "executed_flops", *_SETTING} <= set(trials.columns):
        return np.full(len(trials), -1)
    evidence = _evidence(trials)
    known = (evidence.notna() & trials["executed_flops"].notna()).to_numpy(dtype=bool)
    names = [name for name in (*_RESULT, *_SETTING) if name in trials.columns]
    codes = _group_codes(trials.assign(evidence=evidence), ["evidence", *names]) if known.any() else -1
    return np.where(known, codes, -1)


def _evidence(trials: pd.DataFrame) -> pd.Series[Any]:
    """Values that no two trainings share by chance, missing where there are none."""
    losses = trials["train_loss"].astype("object")
    if "stop_events" not in trials.columns:
        return losses
    stops = trials["stop_events"].astype("object")
    return losses.where(losses.notna(), stops.where(~stops.isin(["", "[]"])))


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
