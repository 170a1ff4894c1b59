"""Invented gradient statistics and clusters for reports."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from report_data import report_data

from analysis.metrics.gradient_history import gradient_clusters, gradient_statistics
from analysis.presentation.html import ReportData

STEPS = (0, 75, 150, 225)
ESTIMATORS = ("sgd", "gradient_clustering")


def statistics(trials: int = 2, layers: tuple[str, ...] = ("a.weight", "b.weight")) -> pd.DataFrame:
    """Statistics of trials 1, 2, ...: SGD's normalised variance is 0.4, 0.5, ... + trial / 100, the other's half."""
    rows = []
    for trial in range(1, trials + 1):
        for place, step in enumerate(STEPS):
            value = 0.4 + 0.1 * place + trial / 100
            found = [
                {
                    "step": step, "estimator": estimator, "gradient_evaluations": 10.0,
                    "total": moments(value / (1 + number)),
                    "layers": {n: moments((value - 0.1 * (k % 4)) / (1 + number)) for k, n in enumerate(layers)},
                }
                for number, estimator in enumerate(ESTIMATORS)
            ]  # fmt: skip
            rows.append({"trial": trial, "epoch": place + 1, "gradient_statistics": json.dumps(found)})
    return gradient_statistics(pd.DataFrame(rows))


def moments(value: float) -> dict[str, float]:
    """Moments of this normalised variance, and of an average variance of a ten thousandth of it."""
    return {"mean": 0.0, "norm": 1.0, "average_variance": value / 1e4, "normalised_variance": value, "snr": 0.5}


def clusters(trial: int = 1) -> pd.DataFrame:
    """Three clusters of 6, 3 and 1 samples."""
    text = (
        '[{"size": 6, "spread": 2.5, "examples": [4, 0]}, {"size": 3, "spread": 1265.4, "examples": [11]}, '
        '{"size": 1, "spread": 0.0, "examples": [2]}]'
    )
    return gradient_clusters(pd.DataFrame({"trial": [trial], "epoch": [4], "gradient_clusters": [text]}))


def with_gradients(trials: int = 2, **more: Any) -> ReportData:
    """The usual report of a small study, with statistics of so many trials and clusters."""
    values = {"gradients": statistics(trials), "clusters": clusters()}
    return report_data(12, **{**values, **more})
