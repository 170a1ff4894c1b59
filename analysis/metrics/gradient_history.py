"""Gradient statistics and clusters that trials reported as JSON in their rows, as tidy DataFrames."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

#: Columns of `gradient_statistics` after those that name the row, with the trial's measurement in the middle.
_MOMENTS = ("mean", "norm", "average_variance", "normalised_variance", "snr", "bias", "bias_noise")
_STATISTICS = {
    "trial": "int64", "epoch": "int64", "step": "int64", "estimator": "string", "layer": "string",
    "gradient_evaluations": "float64", **dict.fromkeys(_MOMENTS, "float64"),
}  # fmt: skip
_CLUSTERS = {
    "trial": "int64", "epoch": "int64", "cluster": "int64", "size": "int64", "share": "float64", "spread": "float64",
    "examples": "object",
}  # fmt: skip


def gradient_statistics(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the gradient statistics that trials measured, one row per measurement, estimator and layer.

    Of rows of `analysis.history`; the last rows of trials (`analysis.load`) have the last epoch's alone. Columns:
    ``study`` (if the epochs have it), ``trial``, ``epoch``, ``step`` (iteration, from 0), ``estimator`` (``sgd`` or a
    method's name), ``layer`` (a parameter's name, empty for all together), the measurement's ``gradient_evaluations``,
    and the statistics of `trainables.gradients.GradientMoments`; ``mean``, ``bias`` and ``bias_noise`` are NaN for
    single layers.

    >>> text = '[{"step": 8, "estimator": "sgd", "total": {"snr": 0.5}, "layers": {"conv1": {"snr": 0.25}}}]'
    >>> found = gradient_statistics(pd.DataFrame({"trial": [3], "epoch": [1], "gradient_statistics": [text]}))
    >>> found[["trial", "step", "layer", "snr"]].values.tolist()
    [[3, 8, '', 0.5], [3, 8, 'conv1', 0.25]]
    """
    rows = [
        (*place, entry["step"], entry["estimator"], layer, entry.get("gradient_evaluations"), *map(found.get, _MOMENTS))
        for place, entries in _entries(epochs, "gradient_statistics")
        for entry in entries
        for layer, found in {"": entry["total"], **entry.get("layers", {})}.items()
    ]
    return _tidy(epochs, rows, _STATISTICS)


def gradient_clusters(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the clusters of similar gradients that trials found after their last epoch, the largest first.

    Of rows of `analysis.history` or of `analysis.load`. Columns: ``study`` (if the epochs have it), ``trial``,
    ``epoch``, ``cluster`` (from 0), ``size`` (samples), ``share`` (of all clusters' samples), ``spread`` (mean squared
    distance of the gradients from the centre), ``examples`` (a tuple: numbers of the samples nearest to it).

    >>> text = '[{"size": 3, "spread": 0.5, "examples": [7, 1]}, {"size": 1, "spread": 0.0, "examples": [4]}]'
    >>> found = gradient_clusters(pd.DataFrame({"trial": [3], "epoch": [30], "gradient_clusters": [text]}))
    >>> found[["size", "share", "examples"]].values.tolist()
    [[3, 0.75, (7, 1)], [1, 0.25, (4,)]]
    """
    rows: list[tuple[Any, ...]] = []
    for place, entries in _entries(epochs, "gradient_clusters"):
        total = sum(entry["size"] for entry in entries)
        for number, entry in enumerate(sorted(entries, key=lambda entry: -entry["size"])):
            size, examples = entry["size"], tuple(entry["examples"])
            rows.append((*place, number, size, size / total, entry["spread"], examples))
    return _tidy(epochs, rows, _CLUSTERS)


def _entries(epochs: pd.DataFrame, column: str) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Yield study (if there), trial and epoch, and the entries of a column of JSON lists, where there are any."""
    if column not in epochs.columns:
        return
    names = [*(["study"] if "study" in epochs.columns else []), "trial", "epoch"]
    some = epochs.loc[~epochs[column].fillna("").isin(["", "[]"]), [*names, column]]
    for *place, text in some.itertuples(index=False, name=None):
        try:
            entries = [entry for entry in json.loads(text) if isinstance(entry, dict)]
        except ValueError:  # a damaged text costs what it held
            continue
        yield tuple(place), entries


def _tidy(epochs: pd.DataFrame, rows: list[tuple[Any, ...]], dtypes: dict[str, str]) -> pd.DataFrame:
    if "study" in epochs.columns:
        dtypes = {"study": "string", **dtypes}
    return pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)
