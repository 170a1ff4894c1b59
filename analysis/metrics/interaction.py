"""Interactions of pairs of parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.io.studies import load
from analysis.metrics.noise import is_constant
from analysis.metrics.parameter_importance import LEAST_TRIALS, SEED, drawn, result_frame, too_few
from analysis.metrics.quality import quality_of
from analysis.metrics.saving import saving_of
from trainables.config import field_kinds
from trainables.savings import objectives_of

#: Random forest: trees, most trials for training, most trials for partial dependences.
_TREES, _MOST_FITTED, _MOST_POINTS = 128, 1000, 40
#: Below this out-of-bag R^2 the forest does not predict the objective, so its interactions are noise.
_LEAST_R2 = 0.2
#: Least share of a pair's joint effect in the prediction's variance. Without this limit, H^2 of two parameters
#: without effect would be a ratio of noise.
_LEAST_EFFECT = 0.05


def interactions(path: str | Path) -> pd.DataFrame:
    """Return pairs of parameters whose joint effect is not the sum of their single effects.

    Friedman and Popescu's statistic H^2 (2008, "Predictive learning via rule ensembles", section 8.1) of a seeded
    random forest: the share of the variance of a pair's joint partial dependence that is not the sum of the two
    single ones. On simulated trials it is 0.00 to 0.03 for additive objectives and 0.59 to 1 for a pure product of
    centred parameters from 120 trials; with few trials a forest underestimates interactions.

    Args:
        path: path of one study, as for `analysis.load`.

    Returns:
        Columns ``objective``, ``first``, ``second``, ``strength`` in [0, 1], strongest first. Pairs whose
        joint effect is below a twentieth of the forest's variance are left out. Parameters are the columns of
        `analysis.load` that vary and that every trial has; lists are left out. An objective that cannot be analysed has
        no rows. ``df.attrs``: ``reason`` (why rows are missing, empty if none are), ``trials`` (number of trials used)
        and ``r2`` (for each objective the forest's out-of-bag R^2, the part of the variance that it can predict).

    Raises:
        UserError: nothing can be read.
    """
    trials = load(path)
    objectives = objectives_of(saving_of(trials), quality_of(trials).name)
    done = trials[(trials["status"] == "completed") & (trials["role"] == "search")].dropna(subset=list(objectives))
    columns = ["first", "second", "strength"]
    attrs: dict[str, Any] = {"trials": len(done), "r2": {}}
    if len(done) < LEAST_TRIALS:
        return result_frame([], columns, [too_few(len(done))], attrs)
    points = _parameters(done)
    if points.shape[1] < 2:
        reason = "an interaction needs two parameters that every trial has and that vary"
        return result_frame([], columns, [reason], attrs)
    rows: list[dict[str, Any]] = []
    reasons = []
    for objective in objectives:
        values = done[objective].to_numpy(dtype="float64")
        if is_constant(values):
            reasons.append(f"{objective} is the same in all {len(done)} trials")
            continue
        forest = _forest(points.to_numpy(), values)
        attrs["r2"][objective] = float(forest.oob_score_)
        if forest.oob_score_ < _LEAST_R2:
            reasons.append(f"{objective} cannot be predicted from the parameters (R^2 {forest.oob_score_:.2f})")
            continue
        evaluated = points.to_numpy()[drawn(len(points), _MOST_POINTS)]
        found = [
            {"objective": objective, "first": points.columns[j], "second": points.columns[k], "strength": strength}
            for j, k, strength, effect in pair_strengths(forest.predict, evaluated)
            if effect >= _LEAST_EFFECT
        ]
        if not found:
            reasons.append(f"no pair of parameters moves {objective}")
        rows += sorted(found, key=lambda row: -row["strength"])
    return result_frame(rows, columns, reasons, attrs)


def pair_strengths(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]], points: NDArray[np.float64]
) -> list[tuple[int, int, float, float]]:
    """Compute Friedman and Popescu's H^2 of every pair of columns (2008, equation 44).

    Args:
        predict: maps (M, P) points to (M,) values.
        points: (N, P) points at which partial dependences are evaluated and over which they are averaged;
            N^2 P (P + 1) / 2 predictions.

    Returns:
        For each pair j < k: j, k, H^2 in [0, 1] (0 where the pair has no effect), and the variance of its joint
        partial dependence as a share of that of the prediction.
    """
    count = points.shape[1]
    single = [_partial_dependence(predict, points, (j,)) for j in range(count)]
    variance = float(np.var(predict(points)))
    found = []
    for j, k in combinations(range(count), 2):
        joint = _partial_dependence(predict, points, (j, k))
        effect, beyond = float(np.mean(joint**2)), float(np.mean((joint - single[j] - single[k]) ** 2))
        # On few points the ratio may slightly exceed 1, as the single effects are not exactly uncorrelated.
        strength = min(1.0, beyond / effect) if effect > 1e-12 * variance else 0.0
        found.append((j, k, strength, effect / variance if variance > 0 else 0.0))
    return found


def _partial_dependence(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    points: NDArray[np.float64],
    columns: tuple[int, ...],
) -> NDArray[np.float64]:
    """Return (N,) centred mean predictions with these columns from one point, the others averaged over all points."""
    number, width = points.shape
    grid = np.tile(points, (number, 1, 1))  # [point, background, column]
    for column in columns:
        grid[:, :, column] = points[:, column, None]
    means = predict(grid.reshape(-1, width)).reshape(number, number).mean(axis=1)
    return means - means.mean()


def _forest(points: NDArray[np.float64], values: NDArray[np.float64]) -> Any:
    from sklearn.ensemble import RandomForestRegressor  # slow to load, and not needed for a study of few trials

    chosen = drawn(len(points), _MOST_FITTED)
    forest = RandomForestRegressor(n_estimators=_TREES, oob_score=True, random_state=SEED)
    return forest.fit(points[chosen], values[chosen])


def _parameters(done: pd.DataFrame) -> pd.DataFrame:
    """Return the hyperparameters that vary and that every trial has, as numbers; text by alphabetical order."""
    found = {}
    for name, kind in field_kinds().items():
        if kind is tuple or name not in done.columns or done[name].isna().any() or done[name].nunique() < 2:
            continue
        column = done[name].astype("category").cat.codes if kind is str else done[name]
        found[name] = column.astype("float64").to_numpy()
    return pd.DataFrame(found)
