"""The numbers of the plots of convergence, cost and learning curves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import ROUNDING, percent, points
from analysis.metrics.accounting import own_fraction, search_fraction
from analysis.metrics.ranking import GIVEN_AWAY
from analysis.presentation.figures.plain_columns import is_one_of, numbers, percent_values, saved
from analysis.presentation.figures.report_data import ReportData

#: Maximum number of learning curves in addition to the baseline's and the chosen trial's.
_MOST_CURVES = 12


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Best saving and hypervolume after each trial."""

    what: str
    """Name of the saving, in words."""
    trial: list[int]
    """Numbers of completed trials, ascending."""
    saved: list[float]
    """Each trial's saving of the compute that the study ranks by, %."""
    within: list[bool]
    """True for each trial within the allowed accuracy loss."""
    best: list[float]
    """Largest saving within the allowed loss up to and including each trial, %; 0 before the first."""
    hypervolume: list[float]
    """Dominated area after each trial, in % compute x points of accuracy; the reference point is nothing saved at the
    baseline's accuracy minus 5 points. Empty without a baseline."""
    labels: list[str]
    """Hover text of each trial."""


def convergence(data: ReportData) -> Convergence | None:
    """Return the best saving and the hypervolume after each trial; None if no trial completed."""
    counted = is_one_of(data.trials, "status", "completed") & ~is_one_of(data.trials, "role", "control")
    rows = data.trials[counted].sort_values("trial")
    share, drop = saved(rows), numbers(rows, "accuracy_drop")
    known = np.isfinite(share)
    rows, share, drop = rows[known], share[known], drop[known]
    if len(rows) == 0:
        return None
    within = drop <= data.allowed_drop + ROUNDING  # False for NaN, that is, without a baseline
    best = np.maximum.accumulate(np.where(within, np.maximum(share, 0.0), 0.0))
    numbers_ = [int(trial) for trial in rows["trial"]]
    return Convergence(
        what=data.saved_words,
        trial=numbers_,
        saved=percent_values(share),
        within=[bool(value) for value in within],
        best=percent_values(best),
        hypervolume=_areas(share, drop) if np.isfinite(drop).any() else [],
        labels=[
            f"trial {t}\n{data.saved_words} {percent(s)}" + ("" if np.isnan(d) else f"\ndrop {points(d)}")
            for t, s, d in zip(numbers_, share, drop, strict=True)
        ],
    )


def _areas(saved: NDArray[np.float64], drop: NDArray[np.float64]) -> list[float]:
    """Compute the dominated area after each trial; keeps the front, so the cost per trial depends on its length."""
    front: list[tuple[float, float]] = []
    areas: list[float] = []
    for x, y in zip(100 * saved, 100 * (GIVEN_AWAY - drop), strict=True):
        dominated = not (x > 0 and y > 0) or any(a >= x and b >= y for a, b in front)
        if not dominated:
            front = sorted([(a, b) for a, b in front if a > x or b > y] + [(float(x), float(y))])
        if dominated and areas:
            areas.append(areas[-1])
            continue
        left = np.array([0.0] + [a for a, _ in front])
        areas.append(round(float(np.sum(np.diff(left) * np.array([b for _, b in front]))), 6))
    return areas


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cumulative compute of the search after each trial, in full trainings."""

    trial: list[int]
    """Numbers of the trials whose compute is known, ascending."""
    executed: list[float]
    """Compute executed up to and including each trial."""
    alone: list[float]
    """Compute of the same trials if each was trained alone from its start."""


def cost(data: ReportData) -> Cost | None:
    """Return the cumulative compute of the search; None if it is unknown."""
    rows = data.trials.sort_values("trial")
    executed = np.asarray(search_fraction(rows), dtype=np.float64)
    alone = np.asarray(own_fraction(rows), dtype=np.float64)
    known = np.isfinite(executed)
    if not known.any():
        return None
    return Cost(
        trial=[int(trial) for trial in rows["trial"][known]],
        executed=[round(float(v), 6) for v in np.cumsum(executed[known])],
        alone=[round(float(v), 6) for v in np.cumsum(np.nan_to_num(alone[known]))],
    )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One trial's accuracy over its epochs."""

    name: str
    """Number of the trial, with its kind for the baseline and the chosen trial."""
    kind: str
    """``baseline``, ``chosen`` or ``trial``."""
    epoch: list[float]
    """Epochs trained."""
    accuracy: list[float]
    """Validation accuracy after these epochs, %."""


def learning_curves(data: ReportData) -> list[Curve]:
    """Return the curves in drawing order: the best other trials of the ranking, the baseline, the chosen trial."""
    history = data.history
    if history is None or len(history) == 0:
        return []
    chosen = None if data.best is None else int(data.best["trial"])
    baselines = [int(trial) for trial in data.trials["trial"][is_one_of(data.trials, "role", "baseline")]]
    wanted = [int(t) for t in data.ranking["trial"] if int(t) not in (chosen, *baselines)][:_MOST_CURVES]
    kinds = dict.fromkeys(reversed(wanted), "trial") | dict.fromkeys(baselines, "baseline")
    if chosen is not None and chosen not in baselines:
        kinds[chosen] = "chosen"
    curves = []
    by_trial = {int(str(trial)): rows for trial, rows in history.groupby("trial")}
    for trial, kind in kinds.items():
        if trial in by_trial:
            curves.append(_curve(by_trial[trial].sort_values("epoch"), trial, kind))
    return [curve for curve in curves if curve.epoch]


def _curve(rows: pd.DataFrame, trial: int, kind: str) -> Curve:
    epoch, accuracy = numbers(rows, "epoch"), numbers(rows, "accuracy")
    known = np.isfinite(epoch) & np.isfinite(accuracy)
    return Curve(
        name=f"trial {trial}" + (f" ({kind})" if kind != "trial" else ""),
        kind=kind,
        epoch=[float(value) for value in epoch[known]],
        accuracy=percent_values(accuracy[known]),
    )


def accuracy_range(curves: list[Curve]) -> tuple[float, float]:
    """Return the initial range of accuracies (%): its lower end ignores the first quarter of the epochs."""
    end = max(curve.epoch[-1] for curve in curves)
    late = [a for curve in curves for e, a in zip(curve.epoch, curve.accuracy, strict=True) if e >= end / 4]
    low, high = min(late), max(a for curve in curves for a in curve.accuracy)
    margin = 0.05 * (high - low) + 0.05
    return low - margin, high + margin
