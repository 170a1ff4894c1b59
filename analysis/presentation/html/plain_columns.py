"""Columns of trials as plain Python values, whatever dtype they have and whether they are there at all."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.saving import saved_of


def numbers(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """A column as float64; NaN where it holds nothing or is missing altogether."""
    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    return np.asarray(
        pd.to_numeric(frame[name], errors="coerce").astype("Float64").to_numpy("float64", na_value=np.nan)
    )


def saved(frame: pd.DataFrame) -> NDArray[np.float64]:
    """What each trial saves of the compute that its study ranks by; NaN where that is not known."""
    if "compute_saved" not in frame.columns:
        return np.full(len(frame), np.nan)
    return np.asarray(saved_of(frame), dtype=np.float64)


def saved_again(frame: pd.DataFrame) -> NDArray[np.float64]:
    """The same of candidates on fresh seeds."""
    return numbers(frame, "saved" if "saved" in frame.columns else "compute_saved")


def texts(frame: pd.DataFrame, name: str) -> list[str]:
    """A column as text; empty where it holds nothing or is missing altogether."""
    if name not in frame.columns:
        return [""] * len(frame)
    return ["" if pd.isna(value) else str(value) for value in frame[name]]


def bare(frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame without ``attrs``, which pandas copies deeply for every row that is looked at."""
    found = frame.copy(deep=False)
    found.attrs = {}
    return found


def is_one_of(frame: pd.DataFrame, name: str, *wanted: str) -> NDArray[np.bool_]:
    """(N,) whether a column holds one of these texts."""
    return np.array([text in wanted for text in texts(frame, name)], dtype=bool)


def number(row: pd.Series, name: str) -> float:
    """A row's number, NaN where it has none."""
    value = row.get(name)
    return float("nan") if value is None or pd.isna(value) else float(value)


def stop_events(value: Any) -> list[dict[str, Any]]:
    """The stops of a trial (column ``stop_events``, JSON), by iteration; none where it cannot be read."""
    try:
        found = json.loads(value) if isinstance(value, str) else []
    except ValueError:
        return []
    events = [e for e in found if isinstance(e, dict) and "iteration" in e and "layer" in e]
    return sorted(events, key=lambda event: int(event["iteration"]))


def percent_values(fractions: NDArray[np.float64]) -> list[float]:
    """Fractions as percentages, without the noise of binary fractions in the last places."""
    return [round(100 * float(value), 6) + 0.0 for value in fractions]  # and no minus before a zero


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite and missing values as None, numpy's as Python's."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value
