"""Duplicate trials, which repeat the training of an earlier completed trial, and outcomes, which group them. Pure.

Any of these shows a *duplicate*: it ended in the same stage of the stage tree; its seed and hyperparameters are equal;
on the same workload, seed and number of epochs it reported bitwise equal training loss, accuracies and FLOPs, as do two
settings that stop the same layers at the same iterations (where no training loss is known, as for many scripts: equal
stops, at least one, accuracies and FLOPs).

Trials of one *outcome* are one setting: one of them is the candidate for confirmation, and its result on fresh seeds
applies to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis.io.checked import group_codes
from analysis.metrics.saving import quality_of
from trainables.config import field_names

#: Columns that are equal in duplicates, in addition to `_evidence` and the metric.
_RESULT = ("executed_flops", "backward_flops", "sparsity")
#: Columns that must be equal for results to be comparable.
_SETTING = ("workload", "seed", "epochs")


def duplicate_of(done: pd.DataFrame) -> pd.arrays.IntegerArray:
    """Return for each trial the number of the earliest with the same training, NA for that one itself."""
    done = done.assign(evidence=_evidence(done))
    order = np.argsort(done["trial"].to_numpy(), kind="stable")
    first = np.arange(len(done))
    by_age = done if (order == first).all() else done.iloc[order]
    for names, known in _equal_in_duplicates(by_age):
        codes = group_codes(by_age, [*names, *({"study"} & set(done.columns))])
        codes = np.where(known.fillna(False).to_numpy(dtype=bool), codes, -1)
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


def _equal_in_duplicates(trials: pd.DataFrame) -> Iterator[tuple[list[str], pd.Series[bool]]]:
    """Yield columns, with ``evidence``, that are equal in trials of one training, and for which trials they tell it."""
    quality, columns, fields = quality_of(trials), set(trials.columns), list(field_names())
    if "stage" in columns:
        yield ["stage"], trials["stage"].notna() & (trials["stage"] != "")
    if set(fields) <= columns:  # where some are missing, an equal seed alone does not make duplicates
        yield fields, trials["method"].notna()
    if {"train_loss", quality.name, "executed_flops", *_SETTING} <= columns:
        names = [name for name in (quality.name, quality.test, *_RESULT, *_SETTING) if name in columns]
        yield ["evidence", *names], trials["evidence"].notna() & trials["executed_flops"].notna()


def _evidence(trials: pd.DataFrame) -> pd.Series[Any] | None:
    """Return values that two different trainings do not share by chance, missing where there are none."""
    if not {"train_loss", "stop_events"} <= set(trials.columns):
        return trials.get("train_loss")
    losses, stops = trials["train_loss"].astype("object"), trials["stop_events"].astype("object")
    return losses.where(losses.notna(), stops.where(~stops.isin(["", "[]"])))
