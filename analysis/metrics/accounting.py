"""Compute that a search executed, and compute of its trials if trained alone. Pure: a frame in, numbers out.

The two are never mixed: a trial's own compute (`executed_flops`, `compute_saved`) is that of its configuration trained
alone; `search_flops` is what the search executed for it, which is less where it shared training with earlier trials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.io.checked import numbers_of
from analysis.metrics.duplicates import duplicate_of

#: Statuses of ended trials. An interrupted one continues as a later trial, so only its compute counts.
_ENDED = ("completed", "failed")


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """Total cost of the trials of a study."""

    trials: int  # trials that completed or failed
    search_flops: int  # FLOPs that the search executed, including those of failed, interrupted and running trials
    dense_equivalents: float
    """The same in dense runs: the FLOPs of each trial divided by its baseline's full budget, summed."""
    own_equivalents: float  # FLOPs that the trials with a result would have executed alone, in dense runs
    completed: int  # trials that completed
    outcomes: int  # those of them that are not `duplicate_of` an earlier one
    outcome_equivalents: float
    """FLOPs that these would have executed alone, in dense runs: repeating an outcome is no training."""


def search_cost(trials: pd.DataFrame) -> SearchCost:
    """Return what a study's search executed. Where `search_flops` is missing, a trial's `executed_flops` count.

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline", "search"], "status": "completed", "dense_flops": 1000,
    ...     "executed_flops": [1000, 700], "search_flops": [1000, 250],
    ... })
    >>> cost = search_cost(trials)
    >>> cost.trials, cost.outcomes, cost.search_flops, cost.dense_equivalents, cost.own_equivalents
    (2, 2, 1250, 1.25, 1.7)
    """
    completed = trials["status"] == "completed"
    own = _in_dense_runs(trials, numbers_of(trials, "executed_flops"))  # what each trial would have executed alone
    repeated = pd.Series(False, index=trials.index)
    if "trial" in trials.columns:
        repeated[completed] = ~duplicate_of(trials[completed]).isna()
    return SearchCost(
        trials=int(trials["status"].isin(_ENDED).sum()),
        search_flops=sum(int(flops) for flops in _search_flops(trials) if not np.isnan(flops)),
        dense_equivalents=float(search_fraction(trials).sum()),
        own_equivalents=float(own.sum()),
        completed=int(completed.sum()),
        outcomes=int((completed & ~repeated).sum()),
        outcome_equivalents=float(own[completed & ~repeated].sum()),
    )


def search_fraction(trials: pd.DataFrame) -> pd.Series[float]:
    """Return what the search executed for each trial, as a fraction of a dense run; NaN where not known."""
    return _in_dense_runs(trials, _search_flops(trials))


def _search_flops(trials: pd.DataFrame) -> pd.Series[float]:
    return numbers_of(trials, "search_flops").fillna(numbers_of(trials, "executed_flops"))


def _in_dense_runs(trials: pd.DataFrame, flops: pd.Series[float]) -> pd.Series[float]:
    dense = numbers_of(trials, "dense_flops")
    completed = trials["status"] == "completed"
    if "role" in trials.columns:
        # A run of fewer epochs has a smaller full budget; one of a script tells that of the steps so far, and what its
        # layers that are frozen from the start would have cost is not seen.
        groups = trials.reindex(columns=["study", "workload", "options"]).astype(object).fillna("").astype(str)
        baselines = dense.where((trials["role"] == "baseline") & completed)
        dense = baselines.groupby([groups[name] for name in groups]).transform("max").fillna(dense)
    found = flops / dense.where(dense > 0)
    # A script that reports no FLOPs may report what it saved, which is final at its end.
    return found.mask(completed & found.isna(), 1 - numbers_of(trials, "compute_saved"))
