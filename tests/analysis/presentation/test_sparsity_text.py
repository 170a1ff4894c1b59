"""Sums and layers of a model's zeros, as text."""

from __future__ import annotations

import pandas as pd
import pytest
from compressed import MACS, frame_of, pruned

from analysis.presentation.markdown_report import layers, sums


def test_sums_are_those_of_the_row() -> None:
    row = frame_of(pruned(0.97, 0.25, columns={"latency_s": 0.0012})).iloc[1]
    assert sums(row) == [
        ("sparsity", "30.0 %"),
        ("sparsity in whole filters, rows or channels", "10.0 %"),
        ("inference compute saved", "25.0 %"),
        ("MACs of a sample, zeros included", f"{MACS:,}"),
        ("MACs of the weights that are not zero", "750,000"),
        ("parameters", "18,482"),
        ("latency of a batch", "1.20 ms"),
    ]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", None, pd.NA])
def test_layers_that_cannot_be_read_are_none(text: object) -> None:
    assert layers(pd.Series({"layer_sparsity": text})) == []
    assert layers(pd.Series({"trial": 1})) == []
