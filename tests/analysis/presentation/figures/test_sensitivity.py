"""The picture of a sensitivity analysis."""

from __future__ import annotations

import pytest

from analysis.presentation.figures.sensitivity import sensitivity


def curves(layers: int) -> dict[str, list[tuple[float, float]]]:
    return {f"block.{i}.conv.weight": [(0.0, 0.9), (0.5, 0.9 - 0.01 * i), (0.95, 0.1)] for i in range(layers)}


def test_a_line_a_layer_in_percent() -> None:
    figure = sensitivity(curves(3), allowed_drop=0.02, pruned="filters")
    assert [trace["name"] for trace in figure.traces] == ["block.0.conv", "block.1.conv", "block.2.conv"]
    assert figure.traces[2]["x"] == [0, 50, 95]
    assert figure.traces[2]["y"] == pytest.approx([90, 88, 10])
    assert figure.traces[2]["hovertext"][1] == "block.2.conv.weight\n50 % pruned: 88.00 %"
    assert figure.layout["xaxis"]["title"]["text"] == "filters pruned of one layer (%)"
    assert figure.layout["yaxis"]["title"]["text"] == "accuracy (%)"
    assert [shape["y0"] for shape in figure.layout["shapes"]] == pytest.approx([88])
    assert figure.layout["annotations"][0]["text"] == "allowed accuracy loss (2.00 points)"
