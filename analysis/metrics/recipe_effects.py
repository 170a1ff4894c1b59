"""Effects of each choice of the training recipe on time, memory and quality, from all trials of a study together.

Symbols: log t = a + sum of the effects of a trial's choices, by least squares over the trials; the effect of a field's
default is 0. So a choice's factor is what it changes while all else stays as it is, as far as choices do not interact.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.io.checked import numbers_of
from analysis.metrics.saving import quality_of
from trainables.training.recipe.fields import RECIPE_FIELDS

#: Columns of the table.
COLUMNS = ("field", "value", "trials", "time_saved", "memory_saved", "quality_change")


def recipe_effects(trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row per field of the recipe and value that trials tried beside its default.

    Args:
        trials: as `analysis.load` gives them. Completed trials count, the baseline among them.

    Returns:
        ``field``, ``value`` (text), ``trials`` (that had it), ``time_saved`` and ``memory_saved`` (shares, negative
        where it costs), ``quality_change`` (in the metric's unit). NaN where the trials cannot tell choices apart, as
        where two were always tried together.

    >>> trials = pd.DataFrame({
    ...     "status": "completed", "precision": [None, "bfloat16", None, "bfloat16"],
    ...     "fused_optimizer": [None, None, True, True], "train_time_s": [10.0, 5.0, 9.0, 4.5],
    ...     "peak_memory_bytes": [100, 80, 100, 80], "accuracy": [0.9, 0.89, 0.9, 0.89],
    ... })
    >>> found = recipe_effects(trials)
    >>> found[["field", "value", "trials"]].values.tolist()
    [['precision', 'bfloat16', 2], ['fused_optimizer', 'yes', 2]]
    >>> found["time_saved"].round(6).tolist()
    [0.5, 0.1]
    """
    done = trials[trials["status"] == "completed"]
    if "role" in done.columns:
        done = done[done["role"] != "control"]
    chosen = [(name, value) for name in RECIPE_FIELDS if name in done.columns for value in _values(done[name])]
    had = np.array([(done[name] == value).fillna(False).to_numpy(bool) for name, value in chosen], dtype=float)
    table = pd.DataFrame(
        {
            "field": [name for name, _ in chosen],
            "value": [_text(value) for _, value in chosen],
            "trials": had.sum(axis=1).astype(int) if len(chosen) else [],
        }
    )
    quality = quality_of(done)
    table["time_saved"] = -np.expm1(_effects(had, numbers_of(done, "train_time_s").map(_log)))
    table["memory_saved"] = -np.expm1(_effects(had, numbers_of(done, "peak_memory_bytes").map(_log)))
    table["quality_change"] = _effects(had, numbers_of(done, quality.name))
    return table[list(COLUMNS)]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def _values(column: pd.Series) -> list[object]:
    return sorted(column.dropna().unique().tolist(), key=str)


def _text(value: object) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _effects(had: np.ndarray, values: pd.Series) -> np.ndarray:
    """Return the effect (C,) of each choice on values (N,); NaN for those that the trials cannot tell apart.

    Args:
        had: (C, N), 1 where a trial had a choice.
        values: of the trials; those without one are left out.
    """
    known = np.isfinite(values.to_numpy())
    if not len(had) or not known.any():
        return np.full(len(had), np.nan)
    design = np.concatenate([np.ones((1, int(known.sum()))), had[:, known]]).T
    found, *_ = np.linalg.lstsq(design, values.to_numpy()[known], rcond=None)
    # A choice is determined if no combination of choices that all trials share contains it.
    _, sizes, directions = np.linalg.svd(design, full_matrices=True)
    rank = int((sizes > 1e-9 * sizes.max()).sum())
    free = np.abs(directions[rank:]).sum(axis=0) > 1e-9
    return np.where(free, np.nan, found)[1:]
