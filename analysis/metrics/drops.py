"""Drops of the metric: limits, and the values that are compared across studies and seeds. Pure."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import ROUNDING
from analysis.io.checked import is_value, numbers_of
from analysis.metrics.quality import quality_of
from trainables.quality import Quality, allowed_amount

#: Accuracy, or share of the value of a metric that is no fraction, by which the default reference of the hypervolume is
#: worse than the baseline.
GIVEN_AWAY = 0.05


def drop_of(quality: Quality) -> dict[str, str]:
    """Return the columns that are not comparable across studies and seeds, and what is compared instead of each."""
    return {quality.name: quality.drop, quality.test: quality.test_drop}


def given_away(quality: Quality, baseline: float) -> float:
    """Return by how much the default reference of the hypervolume is worse than the baseline, in the metric's unit."""
    return GIVEN_AWAY if quality.is_fraction else GIVEN_AWAY * abs(baseline)


def reference_values(rows: pd.DataFrame, quality: Quality) -> pd.Series[float]:
    """Return the baseline's value for each row, which is the row's own value and its drop."""
    return rows[quality.name] + quality.sign * rows[quality.drop]


def allowed_limit(ranking: pd.DataFrame, allowed_drop: float | str) -> float:
    """Return an allowed drop in the metric's unit, a relative one of the mean baseline; NaN where there is none."""
    return float(allowed_amount(allowed_drop, reference_of(ranking)))


def reference_of(trials: pd.DataFrame) -> float:
    """Return the mean value of the baselines; NaN where there is none."""
    return float(numbers_of(trials[is_value(trials, "role", "baseline")], quality_of(trials).name).mean())


def within_drop(rows: pd.DataFrame, allowed_drop: float | str, quality: Quality) -> pd.Series[bool]:
    """Return a mask of the rows within an allowed drop; False where the drop is not known."""
    limit = allowed_amount(allowed_drop, reference_values(rows, quality))
    return (rows[quality.drop] <= limit + ROUNDING).astype(bool)
