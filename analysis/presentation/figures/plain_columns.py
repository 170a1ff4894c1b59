"""Columns of trials as plain values, for any dtype and also for missing columns."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.saving import saved_of
from trainables.quality import Quality


def saved(frame: pd.DataFrame) -> NDArray[np.float64]:
    """Return each trial's saving of the compute that its study ranks by; NaN if unknown."""
    if "compute_saved" not in frame.columns:
        return np.full(len(frame), np.nan)
    return np.asarray(saved_of(frame), dtype=np.float64)


def texts(frame: pd.DataFrame, name: str) -> list[str]:
    """Return a column as text; empty for missing values or a missing column."""
    if name not in frame.columns:
        return [""] * len(frame)
    return ["" if pd.isna(value) else str(value) for value in frame[name]]


def bare(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame without ``attrs``, which pandas would deep-copy for each row accessed."""
    found = frame.copy(deep=False)
    found.attrs = {}
    return found


def is_one_of(frame: pd.DataFrame, name: str, *wanted: str) -> NDArray[np.bool_]:
    """Return for each row whether the column has one of these texts, (N,)."""
    return np.array([text in wanted for text in texts(frame, name)], dtype=bool)


def stop_events(value: Any) -> list[dict[str, Any]]:
    """Return the stops of a trial (column ``stop_events``, JSON) by iteration; empty if they cannot be read."""
    try:
        found = json.loads(value) if isinstance(value, str) else []
    except ValueError:
        return []
    events = [e for e in found if isinstance(e, dict) and "iteration" in e and "layer" in e]
    return sorted(events, key=lambda event: int(event["iteration"]))


def percent_values(fractions: NDArray[np.float64]) -> list[float]:
    """Return fractions as percentages, rounded to remove floating-point noise."""
    return [round(100 * float(value), 6) + 0.0 for value in fractions]  # adding 0.0 turns -0.0 into 0.0


def metric_values(values: NDArray[np.float64], quality: Quality) -> list[float]:
    """Return values of a metric, or drops, as plotted: fractions as percentages; without floating-point noise."""
    return percent_values(values) if quality.is_fraction else [float(f"{value:.12g}") for value in values]


def plain(value: Any) -> Any:
    """Convert a value for JSON: non-finite numbers and missing values to None, numpy types to Python types."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value
