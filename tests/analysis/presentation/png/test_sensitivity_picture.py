"""The picture of a sensitivity analysis: what is in it, by matplotlib's own objects."""

from __future__ import annotations

import io
from itertools import combinations

import pytest
from PIL import Image

from analysis.presentation.png.sensitivity_picture import sensitivity_figure, sensitivity_picture


def curves(layers: int) -> dict[str, list[tuple[float, float]]]:
    return {f"block.{i}.conv.weight": [(0.0, 0.9), (0.5, 0.9 - 0.01 * i), (0.95, 0.1)] for i in range(layers)}


def test_a_line_a_layer_in_percent() -> None:
    figure = sensitivity_figure(curves(3), allowed_drop=0.02, title="digits", pruned="filters")
    (axes,) = figure.axes
    lines = {line.get_gid(): line for line in axes.get_lines() if line.get_gid()}
    assert list(lines) == list(curves(3))
    assert list(lines["block.2.conv.weight"].get_xdata()) == [0, 50, 95]
    assert list(lines["block.2.conv.weight"].get_ydata()) == pytest.approx([90, 88, 10])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("filters pruned of one layer (%)", "accuracy (%)")
    assert axes.get_title() == "digits"
    (limit,) = [line for line in axes.get_lines() if not line.get_gid()]
    assert list(limit.get_ydata()) == pytest.approx([88, 88])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["block.0.conv", "block.1.conv", "block.2.conv", "allowed accuracy loss (2.00 points)"]


def test_twenty_layers_can_be_told_apart_and_read() -> None:
    figure = sensitivity_figure(curves(20), allowed_drop=0.005, title="twenty")
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].get_lines()[:-1]]
    assert all(a != b for a, b in combinations(looks, 2))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    plot = figure.axes[0].get_window_extent()
    assert len(boxes) == 21
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert not any(box.overlaps(plot) for box in boxes)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_many_layers_and_long_names_stay_inside() -> None:
    long = {f"_model.features.denseblock{i}.denselayer1.{'x' * 30}.conv.weight": [(0.0, 0.9)] for i in range(60)}
    figure = sensitivity_figure(long, allowed_drop=0.0, title="$60")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert len(boxes) == 61
    assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert figure.axes[0].get_window_extent().width > 300
    assert figure.legends[0].get_texts()[0].get_text().startswith("...")


def test_the_bytes_are_a_picture_and_the_same_again() -> None:
    first = sensitivity_picture(curves(2), allowed_drop=0.005, title="digits")
    assert first == sensitivity_picture(curves(2), allowed_drop=0.005, title="digits")
    with Image.open(io.BytesIO(first)) as picture:
        assert picture.format == "PNG"
        assert picture.size == (1680, 960)
