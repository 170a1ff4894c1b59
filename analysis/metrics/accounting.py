"""What a search executed, beside what its trials count for alone. Pure: a frame in, numbers out.

Two numbers that are never mixed: a trial's own compute (`executed_flops`, `compute_saved`) is that of its configuration
trained alone; `search_flops` is what the search executed for it, less where a stretch of training was known already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

#: How a trial may have ended. An interrupted one goes on as a later trial, so it counts with its compute alone.
_ENDED = ("completed", "failed")


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """What the trials of a study cost together."""

    trials: int
    """Trials that ended, well or badly."""
    search_flops: int
    """FLOPs that the search executed, those of failed, interrupted and running trials included."""
    dense_equivalents: float
    """The same in dense trainings: each trial's in units of its own full budget with nothing stopped."""
    own_equivalents: float
    """What the trials that have a result would have executed alone, in dense trainings."""


def search_cost(trials: pd.DataFrame) -> SearchCost:
    """What a study's search executed.

    Args:
        trials: one row a trial, as `analysis.load` gives it. A trial of a study without the column `search_flops`
            trained alone, so its `executed_flops` count. One that is known to have executed nothing counts nothing.

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline", "search"], "status": "completed", "dense_flops": 1000,
    ...     "executed_flops": [1000, 700], "search_flops": [1000, 250],
    ... })
    >>> search_cost(trials)
    SearchCost(trials=2, search_flops=1250, dense_equivalents=1.25, own_equivalents=1.7)
    """
    return SearchCost(
        trials=int(trials["status"].isin(_ENDED).sum()),
        search_flops=sum(int(flops) for flops in _search_flops(trials) if not np.isnan(flops)),
        dense_equivalents=float(search_fraction(trials).sum()),
        own_equivalents=float(own_fraction(trials).sum()),
    )


def search_fraction(trials: pd.DataFrame) -> pd.Series[float]:
    """What the search executed for each trial, as a fraction of a dense run; NaN where nothing is known."""
    return _in_dense_runs(trials, _search_flops(trials))


def own_fraction(trials: pd.DataFrame) -> pd.Series[float]:
    """What each trial would have executed alone, as a fraction of a dense run; NaN where nothing is known."""
    return _in_dense_runs(trials, _numbers(trials, "executed_flops"))


def _search_flops(trials: pd.DataFrame) -> pd.Series[float]:
    return _numbers(trials, "search_flops").fillna(_numbers(trials, "executed_flops"))


def _in_dense_runs(trials: pd.DataFrame, flops: pd.Series[float]) -> pd.Series[float]:
    dense = _numbers(trials, "dense_flops")
    if "role" in trials.columns and (trials["role"] == "control").any():
        # A shorter training has a smaller budget of its own; what it costs counts in trainings of the study.
        study = trials["study"] if "study" in trials.columns else pd.Series("", index=trials.index)
        full = dense[trials["role"] == "baseline"].groupby(study).max()
        dense = dense.where(trials["role"] != "control", study.map(full).astype("float64"))
    return flops / dense.where(dense > 0)


def _numbers(trials: pd.DataFrame, name: str) -> pd.Series[float]:
    """A column as float64, NaN where there is none; float64 is exact for counts below 2^53 and to 1e-16 beyond."""
    if name not in trials.columns:
        return pd.Series(np.nan, index=trials.index, dtype="float64")
    return trials[name].astype("Float64").astype("float64")
