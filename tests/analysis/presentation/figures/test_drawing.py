"""A plot as SVG: its labels are at the right marks, its text is text."""

from __future__ import annotations

from xml.etree import ElementTree

import matplotlib
import pytest

from analysis.presentation.figures.drawing import svg_of
from analysis.presentation.figures.figure import Axis, Bars, Figure, Points


def titled(figure: Figure) -> list[tuple[ElementTree.Element, str]]:
    """Elements of the plot with their titles."""
    root = ElementTree.fromstring(svg_of(figure))
    found = [(element, element.find("title")) for element in root.iter()]
    return [(element, title.text or "") for element, title in found if title is not None]


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("differ", [False, True])
def test_each_mark_has_its_own_label(count: int, differ: bool) -> None:
    labels = [f"mark {place}\n<b> $x$ & more" for place in range(count)]
    places = [float((7 * place) % count) for place in range(count)]
    sizes = [4.0 + place % 3 for place in range(count)] if differ else 5.0
    points = Points(name="n", x=places, y=[0.0] * count, labels=labels, colour="@trial", symbol="o", size=sizes)
    found = titled(Figure(name="f", alt="", traces=[points], x=Axis(title="<x>"), y=Axis()))
    assert [text for _, text in found] == labels
    if count > 1:  # from left to right as in the data
        at = [float(element.get("x") or element.get("d", "").split()[1]) for element, _ in found]
        assert sorted(range(count), key=at.__getitem__) == sorted(range(count), key=places.__getitem__)


@pytest.mark.parametrize("differ", [False, True])
def test_marks_that_are_not_seen_are_not_drawn(differ: bool) -> None:
    """Out of the picture, however far, and what is not known: matplotlib drops some of them, and invents others."""
    places = [0.5, 1e5, -1e5, float("nan"), float("inf"), 0.25]
    sizes = [4.0, 5.0, 6.0, 7.0, 8.0, 9.0] if differ else 5.0
    labels = [str(place) for place in places]
    for x, y in ((places, [0.5] * 6), ([0.5] * 6, places)):
        points = Points(name="n", x=x, y=y, labels=labels, colour="@trial", symbol="o", size=sizes, line_width=1)
        figure = Figure(name="f", alt="", traces=[points], x=Axis(range=(1, 0)), y=Axis(range=(0, 1)))
        assert [text for _, text in titled(figure)] == ["0.5", "0.25"]


def test_names_of_any_kind_are_text(recwarn: pytest.WarningsRecorder) -> None:
    names = ["_conv_stem", "head font-family: x", "层", "a\x1b[0m\ud800", "#1b232c"]
    traces = [Points(name=name, x=[0], y=[0], labels=[name], colour="@text", symbol="o") for name in names]
    figure = Figure(name="f", alt="", traces=traces, x=Axis(title="#1b232c"), y=Axis(names=["_fc"]))
    seen = [name.replace("\x1b", "\ufffd").replace("\ud800", "\ufffd") for name in names]
    assert [text for _, text in titled(figure)] == seen
    texts = [(text.text or "").strip() for text in ElementTree.fromstring(svg_of(figure)).iter("text")]
    assert {*seen, "_fc", "#1b232c"} <= set(texts)
    assert not recwarn.list


def test_settings_and_state_of_the_process_stay_out_and_as_they_are() -> None:
    figure = Figure(name="f", alt="", traces=[Points(x=[0, 1], y=[0, 1], colour="@text", line_width=1)], x=Axis(),
                    y=Axis())  # fmt: skip
    drawn, spelled = svg_of(figure), ElementTree.tostring(ElementTree.Element("{http://www.w3.org/2000/svg}g"))
    with matplotlib.rc_context({"lines.marker": "o", "figure.facecolor": "black", "axes.labelsize": 30}):
        assert svg_of(figure) == drawn
        assert matplotlib.rcParams["lines.marker"] == "o"
    assert ElementTree.tostring(ElementTree.Element("{http://www.w3.org/2000/svg}g")) == spelled


def test_numbers_on_axes_are_whole() -> None:
    points = Points(x=[1234.55, 1234.75], y=[2.300005, 2.300007], colour="@text", symbol="o")
    drawn = svg_of(Figure(name="f", alt="", traces=[points], x=Axis(), y=Axis()))
    texts = [text.text or "" for text in ElementTree.fromstring(drawn).iter("text")]
    assert "1234.600" in texts
    assert not [text for text in texts if "+" in text]


def test_bars_and_whole_lines_have_labels_and_gaps_none() -> None:
    bars = Bars(rows=[0, 1], begins=[0, 5], lengths=[5, 2], labels=["first", "second"], colours=["@rest", "@depth:0.1"])
    line = Points(x=[0, 1, 2], y=[0, float("nan"), 1], labels=["all of it"], colour="@text", line_width=2)
    figure = Figure(name="f", alt="", traces=[bars, line], x=Axis(range=(0, 9)), y=Axis(names=["a_b$c$", "d"]))
    assert [text for _, text in titled(figure)] == ["first", "second", "all of it"]
    drawn = svg_of(figure)
    assert ">a_b$c$</text>" in drawn
    assert "fill: color-mix(in srgb,var(--depth1) 40%,var(--depth0))" in drawn


def test_ticks_of_a_logarithmic_axis() -> None:
    def ticks(low: float, high: float) -> set[str | None]:
        points = Points(x=[0, 1], y=[low, high], colour="@text", symbol="o")
        drawn = svg_of(Figure(name="f", alt="", traces=[points], x=Axis(names=["", ""]), y=Axis(logarithmic=True)))
        return {text.text for text in ElementTree.fromstring(drawn).iter("text")}

    assert {"0.01", "0.02", "0.05", "0.1"} <= ticks(0.009, 0.11)
    assert {"0.01", "1"} <= ticks(0.001, 1000)
    assert "0.02" not in ticks(0.001, 1000)
