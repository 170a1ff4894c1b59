"""Sums and layers of a model's zeros, as text."""

from __future__ import annotations

import pandas as pd
import pytest
from compressed import MACS, frame_of, pruned

from analysis.presentation.markdown_report import is_compressed, layers, sums


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


def test_what_was_not_measured_is_left_out() -> None:
    row = frame_of(pruned(0.97, 0.25, columns=dict.fromkeys(("dense_macs", "effective_macs", "parameters")))).iloc[1]
    assert [name for name, _ in sums(row)] == [
        "sparsity", "sparsity in whole filters, rows or channels", "inference compute saved",
    ]  # fmt: skip
    assert sums(pd.Series({"trial": 3})) == []


def test_layers_in_the_models_order() -> None:
    row = frame_of(pruned(0.97, 0.25)).iloc[1]
    assert layers(row) == [("conv1.weight", "40.0 %"), ("conv2.weight", "20.0 %"), ("fc.weight", "0.0 %")]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", None, pd.NA])
def test_layers_that_cannot_be_read_are_none(text: object) -> None:
    assert layers(pd.Series({"layer_sparsity": text})) == []
    assert layers(pd.Series({"trial": 1})) == []


def test_what_compresses_is_told_by_the_method() -> None:
    methods = ("none", "gradskip", "compression", "gradskip+compression", None)
    assert [is_compressed(pd.Series({"method": method})) for method in methods] == [False, False, True, True, False]
    assert not is_compressed(None)
