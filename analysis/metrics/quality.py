"""The metric by which trials of a study are compared (`trainables.quality`), read from their rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from trainables.errors import UserError
from trainables.quality import ACCURACY, QUALITY_FIELDS, Quality, quality_in


def quality_of(trials: pd.DataFrame | pd.Series | None) -> Quality:
    """Return the metric by which trials are compared: by their columns ``metric``, ``direction`` and ``metric_unit``.

    Args:
        trials: rows of studies of one metric, or one row. Where there is no ``metric``, and for None: the accuracy.

    Raises:
        UserError: the rows are of several metrics.

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
