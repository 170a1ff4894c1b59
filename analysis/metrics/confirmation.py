"""Results of a study's confirmation: which of its best settings hold on seeds that the search never used."""

from __future__ import annotations

import warnings

import pandas as pd

from analysis.io.layout import Layout
from analysis.io.studies import load
from analysis.metrics.confidence import compared_column, confirm_table
from analysis.metrics.duplicates import outcome_of, outcomes
from analysis.metrics.noise import resolution_of
from analysis.metrics.quality import quality_of
from trainables.errors import UserError


def read_confirmation(layout: Layout, ranking: pd.DataFrame, *, allowed_drop: float | str) -> pd.DataFrame | None:
    """Return the table of a study's confirmation (`analysis.confirm_table`), None where there is none or no candidate.

    Warns where the confirmation cannot be read, and returns None.

    Args:
        layout: files of the study.
        ranking: ranking of the study; candidates get the number of their outcome (`duplicates`), as a trial that ended
            later may have the same outcome.
        allowed_drop: largest drop allowed, as for `rank`.
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
        resolution=resolution_of(trials[compared_column(trials)]) if quality_of(trials).is_accuracy else None,
        planned=len(planned),
    )
    named = dict(zip(ranking["trial"], outcomes(ranking), strict=True))
    table["candidate"] = table["candidate"].map(lambda number: named.get(number, number)).astype("int64")
    return table if len(table) else None


def of_trial(confirmation: pd.DataFrame | None, trial: pd.Series) -> pd.Series | None:
    """Return the confirmation's row for the outcome of a ranked trial; None where that was not retrained."""
    if confirmation is None:
        return None
    rows = confirmation[confirmation["candidate"] == outcome_of(trial)]
    return None if rows.empty else rows.iloc[0]


def compared(row: pd.Series) -> str:
    """Return the name of the accuracy that was compared, such as "test accuracy".

    Earlier versions compared only the accuracy on the test split and did not record its name.
    """
    return str(row.get("compared", "test accuracy"))


def saved_again(row: pd.Series) -> float:
    """Return what a candidate saves of the ranked compute on fresh seeds; in old tables, of the training compute."""
    return float(row.get("saved", row["compute_saved"]))


def without_refuted(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.DataFrame:
    """Return the ranking without the outcomes that the confirmation refuted."""
    if confirmation is None:
        return ranking
    return ranking[~outcomes(ranking).isin(confirmation.loc[confirmation["refuted"], "candidate"])]
