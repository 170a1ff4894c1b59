"""The plots of gradient statistics: their numbers against those that they are made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from gradient_rows import STEPS, statistics, with_gradients
from report_data import report_data

from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.report_figures import report_figures
from analysis.presentation.figures.variance import gradient_noise, gradient_variance, layer_noise, shown_trial


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_every_trial_has_a_line_of_each_estimator() -> None:
    figure = drawn(gradient_noise(with_gradients(2)))
    lines = {(t["name"], *t["y"]) for t in figure.traces}
    sgd = {("SGD", *(round(0.4 + 0.1 * place + trial / 100, 6) for place in range(4))) for trial in (1, 2)}
    others = {("gradient_clustering", *(round(y / 2, 6) for y in own)) for _, *own in sgd}
    assert lines == sgd | others
    assert all(t["x"] == list(STEPS) for t in figure.traces)
    assert {t["name"]: t["line"]["dash"] for t in figure.traces} == {"SGD": "dash", "gradient_clustering": "solid"}
    assert [t["name"] for t in figure.traces if t["showlegend"]] == ["SGD", "gradient_clustering"]
    assert "SGD 0.415 to 0.715, gradient_clustering 0.208 to 0.358" in figure.alt


def test_of_many_trials_mean_and_range_are_drawn() -> None:
    figure = drawn(gradient_noise(with_gradients(9)))
    sgd = [t["y"] for t in figure.traces if t["name"] == "SGD"]
    assert len(figure.traces) == 6
    for offset, line in zip((0.01, 0.09, 0.05), sgd, strict=True):  # smallest, largest, mean
        assert line == pytest.approx([0.4 + 0.1 * place + offset for place in range(4)])
    assert figure.notes == ["Mean of 9 trials (thick), smallest and largest."]


def test_the_axis_of_average_variance_is_logarithmic_and_has_no_zeros() -> None:
    data = with_gradients(1)
    assert data.gradients is not None
    frame = data.gradients.copy()
    frame.loc[(frame["step"] == 0) & (frame["estimator"] == "sgd"), "average_variance"] = 0.0
    figure = drawn(gradient_variance(replace(data, gradients=frame)))
    lines = {t["name"]: t["x"] for t in figure.traces}
    assert lines == {"SGD": list(STEPS[1:]), "gradient_clustering": list(STEPS)}
    axis = figure.layout["yaxis"]
    values = [y for t in figure.traces for y in t["y"]]
    assert axis["type"] == "log"
    assert 10 ** axis["range"][0] <= min(values) <= max(values) <= 10 ** axis["range"][1]
    assert [float(text) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"])
    assert len(axis["tickvals"]) >= 2
    frame["average_variance"] = 0.0
    assert gradient_variance(replace(data, gradients=frame)) is None


@pytest.mark.parametrize(("low", "high"), [(3.0, 3.0), (1.0, 1.0), (1e-300, 1e300), (2.1e-5, 4.4e-5), (0.99, 1.01)])
def test_a_logarithmic_axis_holds_its_values(low: float, high: float) -> None:
    data = with_gradients(1)
    assert data.gradients is not None
    frame = data.gradients.assign(average_variance=low)
    frame.loc[frame["step"] == STEPS[-1], "average_variance"] = high
    axis = drawn(gradient_variance(replace(data, gradients=frame))).layout["yaxis"]
    first, last = axis["range"]
    assert first < last
    assert first <= math.log10(low) <= math.log10(high) <= last
    assert axis["tickvals"] == sorted(set(axis["tickvals"]))
    assert len(axis["tickvals"]) >= 2


def test_layers_are_in_order_at_the_last_measurement() -> None:
    figure = drawn(layer_noise(with_gradients(2)))
    trial = shown_trial(with_gradients(2), statistics(2))
    assert trial is not None
    last = 0.7 + trial / 100
    assert figure.layout["yaxis"]["ticktext"] == ["a.weight", "b.weight"]
    points = {t["name"]: (t["y"], t["x"]) for t in figure.traces}
    assert points["SGD"] == ([0, 1], pytest.approx([last, last - 0.1]))
    assert points["gradient_clustering"] == ([0, 1], pytest.approx([last / 2, (last - 0.1) / 2]))
    assert f"Trial {trial}, at its last measurement (step {STEPS[-1]})" in figure.notes[0]


def test_many_layers_have_no_names_and_bounded_height() -> None:
    data = with_gradients(gradients=statistics(1, tuple(f"layer{n}" for n in range(300))))
    figure = drawn(layer_noise(data))
    assert set(figure.layout["yaxis"]["ticktext"]) == {""}
    assert figure.height < 800
    low, high = figure.layout["yaxis"]["range"]
    assert high < 0
    assert low > 299


def test_the_shown_trial_is_the_chosen_one_or_the_first_of_the_ranking() -> None:
    data = report_data(12)
    ranked = [int(trial) for trial in data.ranking["trial"]]

    def rows(*trials: int) -> pd.DataFrame:
        return pd.DataFrame({"trial": trials})

    assert data.best is not None
    assert shown_trial(data, rows(*range(12))) == int(data.best["trial"])
    assert shown_trial(replace(data, best=None), rows(ranked[3], ranked[5], 99)) == ranked[3]
    assert shown_trial(data, rows(99, 98)) == 98
    assert shown_trial(data, rows()) is None
    assert shown_trial(data, None) is None


@pytest.mark.parametrize("gradients", [None, statistics(0)])
def test_without_statistics_there_is_no_plot(gradients: Any) -> None:
    names = set(report_figures(report_data(3, gradients=gradients)))
    assert not names & {"gradient_noise", "gradient_variance", "layer_noise"}
