"""Words and lines for a trial that trains fewer epochs than its study's full run."""

from __future__ import annotations

import pandas as pd

#: Variable with the number of epochs to train, where these are fewer than those of the full run.
EPOCHS_VARIABLE = "TUNE_CAC_EPOCHS"


def cut_words(row: pd.Series) -> str:
    """Return ``16 of 30 epochs`` for a trial that trains fewer epochs than its study's full run; else empty."""
    full = row.get("of_epochs")
    return "" if full is None or pd.isna(full) else f"{int(row['epochs'])} of {int(full)} epochs"


def length_lines(row: pd.Series) -> list[str]:
    """Return lines for a shell that set a trial's epochs, where these are fewer than the full run's; else none."""
    if not (words := cut_words(row)):
        return []
    return [
        f"# Train {words}, with a learning-rate schedule of that length:",
        f"export {EPOCHS_VARIABLE}={int(row['epochs'])}",
    ]
