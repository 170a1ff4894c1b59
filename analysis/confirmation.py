"""What a study's confirmation says: which of its best settings held on seeds that the search never saw."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pandas as pd

from analysis.confidence import confirm_table
from analysis.layout import Layout
from analysis.loading import load

#: Probability that all intervals of a confirmation hold together.
CONFIDENCE = 0.95
#: Test splits have no more samples, or their resolution does not matter.
_MOST_SAMPLES = 10**6


def read_confirmation(layout: Layout, *, allowed_drop: float, confidence: float = CONFIDENCE) -> pd.DataFrame | None:
    """The table of a study's confirmation (`analysis.confirm_table`), or None where none was begun.

    Args:
        layout: of the study.
        allowed_drop: accuracy that may be lost, a fraction.
        confidence: with which all intervals hold together.
    """
    child = layout.confirmation
    if not child.info.is_file() or not child.journal.is_file():
        return None
    trials = load(child.root)
    table = confirm_table(
        trials, allowed_drop=allowed_drop, confidence=confidence, resolution=resolution_of(trials["test_accuracy"])
    )
    return table if len(table) else None


def resolution_of(accuracies: pd.Series[float]) -> float | None:
    """One sample of the test split, read off accuracies that are counts over it.

    Each is a reduced fraction of the split's size, so the size is a multiple of all their denominators, as a rule
    their least common one. Read too small, it makes an interval wider.

    Returns:
        1 / that number; None where the accuracies are no such counts, as those of weighted metrics.
    """
    size = 1
    for value in accuracies.dropna().unique():
        size = math.lcm(size, Fraction(float(value)).limit_denominator(_MOST_SAMPLES).denominator)
        if size > _MOST_SAMPLES:
            return None
    return 1 / size if size > 1 else None


def of_trial(confirmation: pd.DataFrame | None, trial: Any) -> pd.Series | None:
    """The row of a candidate that was trained on two fresh seeds at least."""
    if confirmation is None:
        return None
    rows = confirmation[(confirmation["candidate"] == trial) & (confirmation["seeds"] >= 2)]
    return None if rows.empty else rows.iloc[0]
