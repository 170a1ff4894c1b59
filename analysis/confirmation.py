"""What a study's confirmation says: which of its best settings held on seeds that the search never saw."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.confidence import confirm_table
from analysis.layout import Layout
from analysis.loading import load

#: Probability that all intervals of a confirmation hold together.
CONFIDENCE = 0.95


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
    table = confirm_table(load(child.root), allowed_drop=allowed_drop, confidence=confidence)
    return table if len(table) else None


def of_trial(confirmation: pd.DataFrame | None, trial: Any) -> pd.Series | None:
    """The row of a candidate that was trained on two fresh seeds at least."""
    if confirmation is None:
        return None
    rows = confirmation[(confirmation["candidate"] == trial) & (confirmation["seeds"] >= 2)]
    return None if rows.empty else rows.iloc[0]
