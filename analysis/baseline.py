"""Every trial against the baseline of its own seed."""

from __future__ import annotations

import pandas as pd


def relative_to_baseline(trials: pd.DataFrame) -> pd.DataFrame:
    """Add `accuracy_drop`, `test_accuracy_drop` and `time_saved`.

    A trial is compared with the completed trial of role ``baseline`` and the same seed; where there is none, the
    added columns are NaN. With several, their mean counts.

    Args:
        trials: one row a trial, as `analysis.load` gives it.

    Returns:
        A copy with the columns added (or renewed).
    """
    trials = trials.copy()
    done = trials[(trials["role"] == "baseline") & (trials["status"] == "completed")]
    reference = done.groupby("seed")[["accuracy", "test_accuracy", "train_time_s"]].mean()
    seeds = trials["seed"]
    trials["accuracy_drop"] = seeds.map(reference["accuracy"]).astype(float) - trials["accuracy"]
    trials["test_accuracy_drop"] = seeds.map(reference["test_accuracy"]).astype(float) - trials["test_accuracy"]
    trials["time_saved"] = 1 - trials["train_time_s"] / seeds.map(reference["train_time_s"]).astype(float)
    return trials
