"""What a study's confirmation says: which of its best settings held on seeds that the search never saw."""

from __future__ import annotations

import warnings

import pandas as pd

from analysis.io.layout import Layout
from analysis.io.studies import load
from analysis.metrics.confidence import compared_accuracy, confirm_table
from analysis.metrics.duplicates import outcome_of, outcomes
from analysis.metrics.noise import resolution_of
from trainables.errors import UserError

#: Probability that all intervals of a confirmation hold together.
CONFIDENCE = 0.95


def read_confirmation(
    layout: Layout, ranking: pd.DataFrame, *, allowed_drop: float, confidence: float = CONFIDENCE
) -> pd.DataFrame | None:
    """The table of a study's confirmation (`analysis.confirm_table`), or None where none was begun.

    Args:
        layout: of the study.
        ranking: of the study; a candidate is named after its outcome (`duplicates`), which a trial that ended
            late may have in common with it.
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
    named = dict(zip(ranking["trial"], outcomes(ranking), strict=True))
    table["candidate"] = table["candidate"].map(lambda number: named.get(number, number)).astype("int64")
    return table if len(table) else None


def of_trial(confirmation: pd.DataFrame | None, trial: pd.Series) -> pd.Series | None:
    """Return what fresh seeds say of a trial of the ranking: its outcome's row; None where that was not retrained."""
    if confirmation is None:
        return None
    rows = confirmation[confirmation["candidate"] == outcome_of(trial)]
    return None if rows.empty else rows.iloc[0]


def compared(row: pd.Series) -> str:
    """The accuracy that a candidate's drops are of, in words; earlier versions knew that of the test split alone."""
    return str(row.get("compared", "test accuracy"))


def saved_again(row: pd.Series) -> float:
    """What a candidate saves on fresh seeds of the compute that its study ranks by; earlier versions knew one kind."""
    return float(row.get("saved", row["compute_saved"]))


def held(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.DataFrame:
    """The ranking without the outcomes that fresh seeds have refuted."""
    if confirmation is None:
        return ranking
    return ranking[~outcomes(ranking).isin(confirmation.loc[confirmation["refuted"], "candidate"])]
