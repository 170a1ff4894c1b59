"""What a study's confirmation says: which of its best settings held on seeds that the search never saw."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pandas as pd

from analysis.confidence import compared_accuracy, confirm_table
from analysis.layout import Layout
from analysis.loading import load
from trainables.errors import UserError

#: Probability that all intervals of a confirmation hold together.
CONFIDENCE = 0.95
#: Test splits have no more samples, or their resolution does not matter.
_MOST_SAMPLES = 10**6
#: Half of float32's spacing below 1.
_FLOAT32 = 2.0**-24


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
    try:
        trials, planned = load(child.root), child.read_info().candidates
    except UserError as error:
        warnings.warn(f"the confirmation cannot be read: {error}", stacklevel=2)
        return None
    table = confirm_table(
        trials,
        allowed_drop=allowed_drop,
        confidence=confidence,
        resolution=resolution_of(trials[compared_accuracy(trials)]),
        planned=len(planned),
    )
    return table if len(table) else None


def resolution_of(accuracies: pd.Series[float]) -> float | None:
    """One sample of the test split, or a little more, read off accuracies that are counts over it.

    Each is a reduced fraction of the split's size, so that its denominator is no greater than the size. The greatest
    is taken, as found with the precision of float32, in which accuracies are often computed. A size that is read too
    small makes an interval wider.

    Returns:
        1 / that number; None where all accuracies are 0 or 1.
    """
    size = max((_denominator(float(value)) for value in accuracies.dropna().unique()), default=1)
    return 1 / size if size > 1 else None


def _denominator(value: float) -> int:
    """Of the simplest fraction that is this number in float32, or nearly."""
    most = 1
    while True:
        most *= 2
        found = Fraction(value).limit_denominator(most)
        if abs(float(found) - value) <= _FLOAT32 or most > _MOST_SAMPLES:
            return found.denominator


def of_trial(confirmation: pd.DataFrame | None, trial: Any) -> pd.Series | None:
    """A candidate's row; None for a trial that was not retrained."""
    if confirmation is None:
        return None
    rows = confirmation[confirmation["candidate"] == trial]
    return None if rows.empty else rows.iloc[0]


def compared(row: pd.Series) -> str:
    """The accuracy that a candidate's drops are of, in words; earlier versions knew that of the test split alone."""
    return str(row.get("compared", "test accuracy"))


def saved_again(row: pd.Series) -> float:
    """What a candidate saves on fresh seeds of the compute that its study ranks by; earlier versions knew one kind."""
    return float(row.get("saved", row["compute_saved"]))


def held(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.DataFrame:
    """The ranking without the settings that fresh seeds have refuted."""
    if confirmation is None:
        return ranking
    return ranking[~ranking["trial"].isin(confirmation.loc[confirmation["refuted"], "candidate"])]
