"""The metric and the compute that trials of a study are compared and ranked by, read from their rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from analysis.io.checked import is_value, number_of, numbers_of
from trainables.errors import UserError
from trainables.quality import ACCURACY, QUALITY_FIELDS, Quality, quality_in
from trainables.savings import SAVED, SAVINGS, TRAINING, ranked_saving


def quality_of(trials: pd.DataFrame | pd.Series | None) -> Quality:
    """Return the metric by which trials are compared: by their columns ``metric``, ``direction`` and ``metric_unit``.

    Of rows of studies, or one row; where there is no ``metric``, and for None: the accuracy. UserError: the rows are of
    several metrics.

    >>> quality_of(pd.DataFrame({"metric": ["val_loss", "val_loss"], "direction": "min"})).direction
    'min'
    >>> quality_of(pd.Series({"trial": 1})).name
    'accuracy'
    """
    if trials is None:
        return ACCURACY
    if isinstance(trials, pd.Series):
        return quality_in({name: _text(trials.get(name)) for name in QUALITY_FIELDS})
    if "metric" not in trials.columns or trials["metric"].isna().all():
        return ACCURACY
    if trials["metric"].nunique(dropna=False) > 1:
        names = sorted(ACCURACY.name if pd.isna(name) else str(name) for name in trials["metric"].unique())
        raise UserError(f"trials must be of one metric to be compared, got {', '.join(names)}: pick the rows of one")
    return quality_of(trials.iloc[0])


def _text(value: Any) -> str | None:
    return None if value is None or pd.isna(value) or value == "" else str(value)


def saved_of(trials: pd.DataFrame) -> pd.Series[float]:
    """Return what each trial saves of the compute that its study ranks by: fractions, NaN where not known.

    ``compute_saved`` counts where there is no column ``saving``, and for rows without a ``saving``.

    >>> trials = pd.DataFrame({
    ...     "saving": [None, "training", "inference", "both"], "compute_saved": 0.2, "inference_saved": 0.6,
    ... })
    >>> saved_of(trials).tolist()
    [0.2, 0.2, 0.6, 0.4]
    """
    saved = numbers_of(trials, "compute_saved")
    for saving in SAVINGS[1:]:
        if (rows := is_value(trials, "saving", saving)).any():
            saved = saved.mask(rows, ranked_saving(saving, partial(numbers_of, trials)))
    return saved.rename(SAVED)


def saved_of_one(row: pd.Series) -> float:
    """Return what one trial saves of the compute that its study ranks by; NaN where not known."""
    return float(ranked_saving(saving_of(row), partial(number_of, row)))


def ranks_by_training(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows of studies that rank by training compute."""
    if "saving" not in trials.columns:
        return pd.Series(True, index=trials.index)
    return ~trials["saving"].isin(SAVINGS[1:])


def saving_of(trials: pd.DataFrame | pd.Series | None) -> str:
    """Return what a study ranks by, from its first trial with a ``saving``; training where none has one, and for None.

    >>> saving_of(pd.DataFrame({"saving": [None, "both"]})), saving_of(pd.Series({"trial": 1}))
    ('both', 'training')
    """
    found: Any = None
    if isinstance(trials, pd.Series):
        found = trials.get("saving")
    elif trials is not None and "saving" in trials.columns:
        found = next(iter(trials["saving"].dropna()), None)
    return TRAINING if found is None or pd.isna(found) else str(found)
