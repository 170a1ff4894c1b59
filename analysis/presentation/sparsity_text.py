"""Sparsity and MACs of a trial's model, in total and by layer, as text cells. Pure: a row in, cells out.

Sparsities are fractions of the elements; MACs are multiply-accumulate operations for one sample.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import pandas as pd

from analysis.formatting import percent
from analysis.io.checked import number_of

#: Counts among the totals: column, label.
_COUNTS = (
    ("dense_macs", "MACs of a sample, zeros included"),
    ("effective_macs", "MACs of the weights that are not zero"),
    ("parameters", "parameters"),
)
_SHARES = (
    ("sparsity", "sparsity"),
    ("structured_sparsity", "sparsity in whole filters, rows or channels"),
    ("inference_saved", "inference compute saved"),
)


def is_compressed(row: pd.Series | None) -> bool:
    """Return whether a trial used a compression schedule."""
    return row is not None and "compression" in str(row.get("method")).split("+")


def sums(row: pd.Series) -> list[tuple[str, str]]:
    """Return names and values of a model's totals; values that were not measured are left out.

    >>> sums(pd.Series({"sparsity": 0.8, "effective_macs": 51200, "latency_s": 0.0123}))
    [('sparsity', '80.0 %'), ('MACs of the weights that are not zero', '51,200'), ('latency of a batch', '12.30 ms')]
    """
    found = [(said, percent(number_of(row, name))) for name, said in _SHARES if isfinite(number_of(row, name))]
    found += [(said, f"{number_of(row, name):,.0f}") for name, said in _COUNTS if isfinite(number_of(row, name))]
    if isfinite(number_of(row, "latency_s")):
        found.append(("latency of a batch", f"{1000 * number_of(row, 'latency_s'):.2f} ms"))
    return found


def layers(row: pd.Series) -> list[tuple[str, str]]:
    """Return the names of the weights and their sparsities, in the model's order; empty if not measured.

    >>> layers(pd.Series({"layer_sparsity": '{"conv1.weight": 0.25, "fc.weight": 0}'}))
    [('conv1.weight', '25.0 %'), ('fc.weight', '0.0 %')]
    """
    try:
        found: Any = json.loads(row["layer_sparsity"])
    except (KeyError, TypeError, ValueError):
        return []
    if not isinstance(found, dict):
        return []
    return [(name, percent(share)) for name, share in found.items() if isinstance(share, (int, float))]
