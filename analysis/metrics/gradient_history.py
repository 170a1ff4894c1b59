"""Gradient statistics and clusters that trials reported as JSON in their rows, as tidy DataFrames."""

from __future__ import annotations

import json
import math
import sys
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
#: Larger numbers are no steps and no sizes, and int64 would not hold them.
_MOST = 2**53


def gradient_statistics(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the gradient statistics that trials measured, one row per measurement, estimator and layer.

    Args:
        epochs: rows of `analysis.history`; the last rows of trials (`analysis.load`) have the last epoch's alone.

    Returns:
        In the order of the rows: ``study`` (if the epochs have it), ``trial``, ``epoch``, ``step`` (iteration, from 0),
        ``estimator`` (``sgd`` or a method's name), ``layer`` (a parameter's name, empty for all together), the
        measurement's ``gradient_evaluations``, and the statistics of `trainables.gradients.GradientMoments`;
        ``mean``, ``bias`` and ``bias_noise`` are NaN for single layers. What cannot be read is left out. No rows for
        trials without statistics.

    >>> text = '[{"step": 8, "estimator": "sgd", "total": {"snr": 0.5}, "layers": {"conv1": {"snr": 0.25}}}]'
    >>> found = gradient_statistics(pd.DataFrame({"trial": [3], "epoch": [1], "gradient_statistics": [text]}))
    >>> found[["trial", "step", "layer", "snr"]].values.tolist()
    [[3, 8, '', 0.5], [3, 8, 'conv1', 0.25]]
    """
    rows = [
        (*place, step, estimator, layer, evaluations, *(_number(found.get(name)) for name in _MOMENTS))
        for place, step, estimator, evaluations, moments in _measurements(epochs)
        for layer, found in moments
    ]
    return _tidy(epochs, rows, _STATISTICS)


def gradient_clusters(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the clusters of similar gradients that trials found after their last epoch, the largest first.

    Args:
        epochs: rows of `analysis.history` or of `analysis.load`.

    Returns:
        One row per cluster: ``study`` (if the epochs have it), ``trial``, ``epoch``, ``cluster`` (from 0), ``size``
        (samples), ``share`` (of all clusters' samples), ``spread`` (mean squared distance of the gradients from the
        centre), ``examples`` (a tuple: numbers of the samples nearest to it). What cannot be read is left out.

    >>> text = '[{"size": 3, "spread": 0.5, "examples": [7, 1]}, {"size": 1, "spread": 0.0, "examples": [4]}]'
    >>> found = gradient_clusters(pd.DataFrame({"trial": [3], "epoch": [30], "gradient_clusters": [text]}))
    >>> found[["size", "share", "examples"]].values.tolist()
    [[3, 0.75, (7, 1)], [1, 0.25, (4,)]]
    """
    rows: list[tuple[Any, ...]] = []
    for place, entries in _entries(epochs, "gradient_clusters"):
        sizes = [_count(entry.get("size")) for entry in entries]
        total = sum(size for size in sizes if size)
        found = [(size, entry) for size, entry in zip(sizes, entries, strict=True) if size]
        for number, (size, entry) in enumerate(sorted(found, key=lambda pair: -pair[0])):
            named = entry.get("examples")
            examples = [_count(sample) for sample in named] if isinstance(named, list) else []
            kept = tuple(sample for sample in examples if sample is not None)
            rows.append((*place, number, size, size / total, _number(entry.get("spread")), kept))
    return _tidy(epochs, rows, _CLUSTERS)


def _measurements(
    epochs: pd.DataFrame,
) -> Iterator[tuple[tuple[Any, ...], int, str, float, list[tuple[str, dict[str, Any]]]]]:
    """Yield place, step, estimator, gradient evaluations, and moments by layer, those of all together first."""
    for place, entries in _entries(epochs, "gradient_statistics"):
        for entry in entries:
            step, estimator = _count(entry.get("step")), entry.get("estimator")
            total, layers = entry.get("total"), entry.get("layers")
            if step is None or not isinstance(estimator, str) or not isinstance(total, dict):
                continue
            named = layers.items() if isinstance(layers, dict) else ()
            moments = [("", total), *((name, found) for name, found in named if name and isinstance(found, dict))]
            yield place, step, estimator, _number(entry.get("gradient_evaluations")), moments


def _entries(epochs: pd.DataFrame, column: str) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Yield study (if there), trial and epoch, and the entries of a column of JSON lists, where there are any.

    Nearly all rows of most studies are empty, so these are left out before anything is looked at one by one.
    """
    if column not in epochs.columns:
        return
    texts = epochs[column].astype("string")
    some = epochs.loc[(texts.notna() & (texts != "[]")).to_numpy(dtype=bool), [*_names(epochs), column]]
    for *place, text in some.itertuples(index=False, name=None):
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            continue
        entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        if entries and not any(pd.isna(name) for name in place):
            yield tuple(place), entries


def _names(epochs: pd.DataFrame) -> list[str]:
    return [*(["study"] if "study" in epochs.columns else []), "trial", "epoch"]


def _tidy(epochs: pd.DataFrame, rows: list[tuple[Any, ...]], dtypes: dict[str, str]) -> pd.DataFrame:
    if "study" in epochs.columns:
        dtypes = {"study": "string", **dtypes}
    return pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)


def _number(value: Any) -> float:
    """Return a number of JSON; NaN for anything else, and for one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return math.nan
    return float(value)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None
