"""The plots of gradient statistics against invented ones."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from gradient_rows import STEPS, statistics, with_gradients
from report_data import report_data

from analysis.presentation.figures.figure import Figure, Points
from analysis.presentation.figures.gradient_noise import gradient_noise, layer_noise, shown_trial


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def points(figure: Figure) -> list[Points]:
    return [trace for trace in figure.traces if isinstance(trace, Points)]


def test_every_trial_has_a_line_of_each_estimator() -> None:
    figure = drawn(gradient_noise(with_gradients(2)))
    lines = {(t.labels[0].split(",")[0], *t.y) for t in points(figure)}
    sgd = {("SGD", *(round(0.4 + 0.1 * place + trial / 100, 6) for place in range(4))) for trial in (1, 2)}
    others = {("gradient_clustering", *(round(y / 2, 6) for y in own)) for _, *own in sgd}
    assert lines == sgd | others
    assert all(t.x == list(STEPS) for t in points(figure))
    assert {t.name: t.dashed for t in points(figure) if t.name} == {"SGD": True, "gradient_clustering": False}
    assert "SGD 0.415 to 0.715, gradient_clustering 0.208 to 0.358" in figure.alt


def test_of_many_trials_mean_and_range_are_drawn() -> None:
    figure = drawn(gradient_noise(with_gradients(9)))
    sgd = [t.y for t in points(figure) if t.labels[0].startswith("SGD")]
    assert len(figure.traces) == 6
    for offset, line in zip((0.01, 0.09, 0.05), sgd, strict=True):  # smallest, largest, mean
        assert line == pytest.approx([0.4 + 0.1 * place + offset for place in range(4)])
    assert figure.notes == ["Mean of 9 trials (thick), smallest and largest."]


def test_layers_are_in_order_at_the_last_measurement() -> None:
    figure = drawn(layer_noise(with_gradients(2)))
    trial = shown_trial(with_gradients(2), statistics(2))
    assert trial is not None
    last = 0.7 + trial / 100
    assert figure.y.names == ["a.weight", "b.weight"]
    found = {t.name: (t.y, t.x) for t in points(figure)}
    assert found["SGD"] == ([0, 1], pytest.approx([last, last - 0.1]))
    assert found["gradient_clustering"] == ([0, 1], pytest.approx([last / 2, (last - 0.1) / 2]))
    assert f"Trial {trial}, at its last measurement (step {STEPS[-1]})" in figure.notes[0]


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
