"""Duplicate trials, which repeat the training of an earlier trial, and outcomes, which group them. Pure.

A *duplicate* is a trial with the same training as an earlier completed trial of the same table, shown by one of these:

- it ended in the same stage of the stage tree;
- its seed and hyperparameters are equal;
- on the same workload, seed and number of epochs it reported bitwise equal training loss, accuracies and FLOPs, as do
  two settings that stop the same layers at the same iterations; where no training loss is known, as for many scripts,
  equal stops (at least one), accuracies and FLOPs.

Trials of one *outcome* are one setting: one of them is the candidate for confirmation, and its result on fresh seeds
applies to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.io.checked import group_codes
from analysis.metrics.saving import quality_of
from trainables.config import field_names

#: Columns that are equal in duplicates, in addition to `_evidence` and the metric.
_RESULT = ("executed_flops", "backward_flops", "sparsity")
#: Columns that must be equal for results to be comparable.
_SETTING = ("workload", "seed", "epochs")


def duplicate_of(done: pd.DataFrame) -> pd.arrays.IntegerArray:
    """Return for each trial the number of the earliest with the same training, NA for that one itself."""
    order = np.argsort(done["trial"].to_numpy(), kind="stable")
    first = np.arange(len(done))
    by_age = done if (order == first).all() else done.iloc[order]
    for codes in (_stage_codes(by_age), _setting_codes(by_age), _result_codes(by_age)):
        _, earliest, group = np.unique(codes, return_index=True, return_inverse=True)
        first = np.where(codes < 0, first, np.minimum(first, earliest[group]))
    while (first[first] != first).any():
        first = first[first]  # equal settings to a trial that has the same stage as another
    numbers = np.empty(len(done), dtype="int64")
    same = np.empty(len(done), dtype=bool)
    numbers[order] = by_age["trial"].to_numpy()[first]
    same[order] = first != np.arange(len(done))
    return pd.arrays.IntegerArray(numbers, ~same)


def outcomes(ranking: pd.DataFrame) -> pd.Series[int]:
    """Return for each row of a ranking the number of its outcome, which is that of its earliest trial."""
    if "duplicate_of" not in ranking.columns:
        return ranking["trial"]
    return ranking["duplicate_of"].fillna(ranking["trial"]).astype("int64")


def outcome_of(row: pd.Series) -> int:
    """Return the number of the outcome of one row, as `outcomes`."""
    earlier = row.get("duplicate_of")
    return int(row["trial"] if earlier is None or pd.isna(earlier) else earlier)


def _stage_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """Return a number for each stage in which trials ended, -1 where not known."""
    if "stage" not in trials.columns:
        return np.full(len(trials), -1)
    return _codes(trials, ["stage"], trials["stage"].notna() & (trials["stage"] != ""))


def _setting_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """Return a number for each set of hyperparameters; all -1 in a table without them."""
    names = list(field_names())
    if not set(names) <= set(trials.columns):  # columns are missing: an equal seed alone does not make duplicates
        return np.full(len(trials), -1)
    return _codes(trials, names, trials["method"].notna())


def _result_codes(trials: pd.DataFrame) -> NDArray[np.int64]:
    """Return a number for each result, -1 where it is too incomplete to identify duplicates."""
    quality = quality_of(trials)
    if not {"train_loss", quality.name, "executed_flops", *_SETTING} <= set(trials.columns):
        return np.full(len(trials), -1)
    trials = trials.assign(evidence=_evidence(trials))
    names = [name for name in (quality.name, quality.test, *_RESULT, *_SETTING) if name in trials.columns]
    return _codes(trials, ["evidence", *names], trials["evidence"].notna() & trials["executed_flops"].notna())


def _evidence(trials: pd.DataFrame) -> pd.Series[Any]:
    """Return values that two different trainings do not share by chance, missing where there are none."""
    losses = trials["train_loss"].astype("object")
    if "stop_events" not in trials.columns:
        return losses
    stops = trials["stop_events"].astype("object")
    return losses.where(losses.notna(), stops.where(~stops.isin(["", "[]"])))


def _codes(trials: pd.DataFrame, names: Sequence[str], known: pd.Series[bool]) -> NDArray[np.int64]:
    """Return a number for each combination of values within a study, -1 where not known."""
    codes = group_codes(trials, [*names, *({"study"} & set(trials.columns))]) if known.any() else -1
    return np.where(known.fillna(False).to_numpy(dtype=bool), codes, -1)
