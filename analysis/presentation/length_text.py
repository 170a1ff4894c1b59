"""Words and lines for a trial that trains fewer epochs than its study's full run."""

from __future__ import annotations

import pandas as pd

from trainables.script.placeholders import EPOCHS_VARIABLE


def cut_words(row: pd.Series) -> str:
    """Return ``16 of 30 epochs`` for a trial that trains fewer epochs than its study's full run; else empty."""
    full = row.get("of_epochs")
    return "" if full is None or pd.isna(full) else f"{int(row['epochs'])} of {int(full)} epochs"


def length_lines(row: pd.Series) -> list[str]:
    """Return lines for a shell that set a trial's epochs, where these are fewer than the full run's; else none."""
    return shorter_lines(int(row["epochs"]), int(row["of_epochs"])) if cut_words(row) else []


def shorter_lines(epochs: int, of_epochs: int) -> list[str]:
    """Return lines for a shell that set the epochs of a run, fewer than the full run's.

    Args:
        epochs: of the run.
        of_epochs: of the full run.
    """
    return [
        f"# Train {epochs} of {of_epochs} epochs, with a learning-rate schedule of that length:",
        f"export {EPOCHS_VARIABLE}={epochs}",
    ]
