"""Gradient statistics and clusters out of rows, against rows written by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

import analysis

TOTAL = {"mean": 0.5, "norm": 2.0, "average_variance": 3e-5, "normalised_variance": 0.75, "snr": -0.25, "bias": 0.0,
         "bias_noise": 0.125}  # fmt: skip
LAYER = {"norm": 1.5, "average_variance": 2e-5, "normalised_variance": 0.5, "snr": 0.375}


def measurement(step: int, estimator: str = "sgd", **changed: Any) -> dict[str, Any]:
    return {"step": step, "estimator": estimator, "gradient_evaluations": 50.0, "total": TOTAL,
            "layers": {"a.weight": LAYER}} | changed  # fmt: skip


def epochs(*texts: Any, column: str = "gradient_statistics") -> pd.DataFrame:
    """Epochs 1, 2, ... of trial 4."""
    return pd.DataFrame({"trial": 4, "epoch": range(1, len(texts) + 1), column: list(texts)})


def test_a_row_for_each_measurement_estimator_and_layer() -> None:
    texts = (json.dumps([measurement(0), measurement(0, "svrg")]), "[]", json.dumps([measurement(25)]))
    frame = analysis.gradient_statistics(epochs(*texts))
    expected = [
        {"trial": 4, "epoch": epoch, "step": step, "estimator": estimator, "layer": layer, "gradient_evaluations": 50.0,
         **dict.fromkeys(TOTAL, math.nan), **moments}
        for epoch, step, estimator in ((1, 0, "sgd"), (1, 0, "svrg"), (3, 25, "sgd"))
        for layer, moments in (("", TOTAL), ("a.weight", LAYER))
    ]  # fmt: skip
    pd.testing.assert_frame_equal(frame, pd.DataFrame(expected).astype({"estimator": "string", "layer": "string"}))


def test_clusters_are_rows_the_largest_first() -> None:
    found = [
        {"size": 1, "spread": 0.5, "examples": [7]},
        {"size": 3, "spread": 2.0, "examples": [4, 0, 2]},
    ]
    frame = analysis.gradient_clusters(epochs("[]", json.dumps(found), column="gradient_clusters"))
    assert frame.to_dict("records") == [
        {"trial": 4, "epoch": 2, "cluster": 0, "size": 3, "share": 0.75, "spread": 2.0, "examples": (4, 0, 2)},
        {"trial": 4, "epoch": 2, "cluster": 1, "size": 1, "share": 0.25, "spread": 0.5, "examples": (7,)},
    ]


def test_rows_of_several_studies_keep_their_study() -> None:
    frame = epochs(json.dumps([measurement(0)])).assign(study="mine")
    assert list(analysis.gradient_statistics(frame)["study"]) == ["mine", "mine"]
    assert list(analysis.gradient_statistics(frame).columns[:2]) == ["study", "trial"]


def test_without_statistics_there_are_columns_and_no_rows() -> None:
    full = analysis.gradient_statistics(epochs(json.dumps([measurement(0)])))
    for frame in (epochs("[]", None, ""), epochs("[]").drop(columns="gradient_statistics"), epochs()):
        found = analysis.gradient_statistics(frame)
        assert len(found) == 0
        assert found.dtypes.to_dict() == full.dtypes.to_dict()
        assert len(analysis.gradient_clusters(frame)) == 0
