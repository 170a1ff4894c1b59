"""The numbers of the plots: against counting by hand, and the hypervolume against the general one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_data import EPOCHS, STEPS, report_data
from studies import result_row

from analysis.io.studies import to_frame
from analysis.metrics.accounting import search_cost
from analysis.metrics.pareto import hypervolume
from analysis.metrics.ranking import best, rank
from analysis.presentation.figures.course import accuracy_range, convergence, cost, learning_curves
from analysis.presentation.figures.outcomes import confirmation, importance, interactions, pareto
from analysis.presentation.figures.stops import MOST_ROWS, near_thresholds, timeline, variance
from analysis.presentation.html import ReportData
from trainables.config import TrialConfig


def study(*outcomes: tuple[float, float], events: list[list[dict[str, Any]]] | None = None) -> ReportData:
    """A baseline of accuracy 0.9 and trials of (accuracy, compute saved)."""
    records = []
    for number, (accuracy, saved) in enumerate([(0.9, 0.0), *outcomes]):
        method = "gradskip" if number else "none"
        stops = json.dumps(events[number - 1]) if events and number else "[]"
        records.append(
            {
                "trial": number, "role": "search" if number else "baseline", "status": "completed", "error": None,
                "row": result_row(accuracy, saved, step=100, stop_events=stops),
                "config": TrialConfig(method=method).to_dict(),
            }
        )  # fmt: skip
    trials = to_frame(records)
    ranking = rank(trials, allowed_drop=0.01)
    optional = ("history", "importance", "interactions", "controls", "confirmation", "variance", "stops", "thresholds")
    empty: dict[str, Any] = dict.fromkeys(optional)
    given = {"trials": trials, "ranking": ranking, "best": best(ranking), "allowed_drop": 0.01, **empty}
    return ReportData(**{**vars(_template()), **given})


@cache
def _template() -> ReportData:
    return report_data(3)


@cache
def one_trial() -> ReportData:
    return study((0.89, 0.3))


class TestPareto:
    def test_places_of_all_kinds(self) -> None:
        found = pareto(study((0.89, 0.3), (0.85, 0.2), (0.88, 0.4)))
        assert found is not None
        assert (found.baseline.x, found.baseline.y) == ([0.0], [90.0])
        assert sorted(zip(found.trials.x, found.trials.y, strict=True)) == [(20, 85), (30, 89), (40, 88)]
        assert (found.front.x, found.front.y) == ([0, 30, 40], [90, 89, 88])
        assert (found.chosen.x, found.chosen.y) == ([30], [89])
        assert found.least_accuracy == pytest.approx(89)

    def test_equal_outcomes_are_one_mark_that_names_its_trials(self) -> None:
        found = pareto(study((0.89, 0.3), (0.89, 0.3), (0.88, 0.4)))
        assert found is not None
        assert found.trials.counts == [2, 1]
        assert found.trials.labels[0].startswith(
            "trials 1, 2\ncompute saved 30.0 %\naccuracy 89.00 %, accuracy loss 1.00 points"
        )

    def test_controls_draw_a_line_from_the_baseline(self) -> None:
        controls = pd.DataFrame(
            {"control": ["shorter", "random stops", "shorter", "shorter"], "compute_saved": [0.5, 0.3, 0.2, np.nan],
             "accuracy": [0.8, 0.7, 0.88, 0.9]}
        )  # fmt: skip
        found = pareto(replace(study((0.89, 0.3)), controls=controls))
        assert found is not None
        assert (found.shorter.x, found.shorter.y) == ([0, 20, 50], [90, 88, 80])
        assert (found.random_stops.x, found.random_stops.y) == ([30], [70])

    def test_controls_among_the_ranked_are_no_searched_trials(self) -> None:
        data = study((0.89, 0.3), (0.9, 0.5))
        ranking = data.ranking.copy()
        ranking.loc[ranking["trial"] == 2, "role"] = "control"
        found = pareto(replace(data, ranking=ranking))
        assert found is not None
        assert found.trials.x == [30]
        assert 50 not in found.front.x

    def test_what_lies_far_below_does_not_squeeze_the_rest_and_is_counted(self) -> None:
        found = pareto(study((0.89, 0.3), (0.1, 0.35), (0.1, 0.36), (0.1, 0.36)))
        assert found is not None
        assert found.y_range[0] > 80
        assert found.y_range[1] > 90
        assert found.below == 3

    def test_nothing_completed(self) -> None:
        data = study((0.89, 0.3))
        assert pareto(replace(data, ranking=data.ranking.iloc[:0], best=None)) is None


def test_confirmation_in_points_with_the_interval_in_words() -> None:
    frame = pd.DataFrame(
        {"candidate": [7], "seeds": [5], "compute_saved": [0.31], "accuracy_drop": [0.001], "drop_low": [-0.002],
         "drop_high": [0.004], "confidence": [0.95], "confirmed": [True]}
    )  # fmt: skip
    found = confirmation(replace(study((0.89, 0.3)), confirmation=frame))
    assert found is not None
    assert (found.candidates, found.confirmed, found.allowed) == (["trial 7"], [True], 1.0)
    assert (found.drop, found.low, found.high) == ([0.1], [-0.2], [0.4])
    assert "accuracy loss 0.10 points, 95 % interval -0.20 points to 0.40 points" in found.labels[0]
    assert confirmation(study((0.89, 0.3))) is None


def test_bars_are_greatest_first_and_named_in_short() -> None:
    data = report_data(20)
    first, second = importance(data)
    assert (first.objective, second.objective) == ("accuracy", "compute_saved")
    assert first.title == "accuracy: shares of 43.2 % of its variance"
    assert interactions(data)[0].title == "accuracy"
    assert first.names[:2] == ["START_ITR", "START_THR"]
    assert first.values == sorted(first.values, reverse=True)
    assert sum(first.values) == pytest.approx(1)
    assert interactions(data)[0].names[0] == "START_THR × START_ITR"  # noqa: RUF001
    assert importance(replace(data, importance=None)) == []


class TestConvergence:
    def test_only_what_is_within_the_drop_counts(self) -> None:
        found = convergence(study((0.895, 0.1), (0.5, 0.9), (0.895, 0.05), (0.89, 0.3)))
        assert found is not None
        assert found.best == [0, 10, 10, 10, 30]
        assert found.within == [True, True, False, True, True]

    @given(st.lists(st.tuples(st.integers(700, 1000), st.integers(-100, 900)), min_size=1, max_size=12))
    def test_hypervolume_of_every_prefix(self, outcomes: list[tuple[int, int]]) -> None:
        accuracy = np.array([900, *(a for a, _ in outcomes)]) / 1000
        saved = np.array([0, *(s for _, s in outcomes)]) / 1000
        trials = pd.DataFrame(
            {"trial": range(len(saved)), "role": "search", "status": "completed", "compute_saved": saved,
             "accuracy_drop": 0.9 - accuracy}
        )  # fmt: skip
        found = convergence(replace(one_trial(), trials=trials))
        assert found is not None
        points = 100 * np.stack([saved, accuracy], axis=1)
        areas = [hypervolume(points[: n + 1], (0.0, 85.0)) for n in range(len(points))]
        assert found.hypervolume == pytest.approx(areas, abs=1e-4)

    def test_without_a_baseline_nothing_is_within_and_there_is_no_area(self) -> None:
        data = study((0.895, 0.1))
        trials = data.trials[data.trials["trial"] > 0].assign(accuracy_drop=np.nan)
        found = convergence(replace(data, trials=trials))
        assert found is not None
        assert (found.best, found.hypervolume) == ([0.0], [])


def test_cost_ends_at_what_the_search_cost() -> None:
    data = report_data(40)
    found, total = cost(data), search_cost(data.trials)
    assert found is not None
    assert found.executed[-1] == pytest.approx(total.dense_equivalents)
    assert found.alone[-1] == pytest.approx(total.own_equivalents)
    assert found.executed == sorted(found.executed)


def test_learning_curves_of_baseline_and_chosen_come_last_so_that_they_lie_on_top() -> None:
    data = report_data(40)
    curves = learning_curves(data)
    assert data.best is not None
    assert [curve.kind for curve in curves[-2:]] == ["baseline", "chosen"]
    assert curves[-1].name == f"trial {data.best['trial']} (chosen)"
    assert curves[-1].epoch == list(range(1, EPOCHS + 1))
    assert curves[-1].accuracy[-1] == pytest.approx(100 * data.best["accuracy"], abs=0.5)
    low, high = accuracy_range(curves)
    assert low > curves[-1].accuracy[0]
    assert high > max(curves[-1].accuracy)
    assert learning_curves(replace(data, history=None)) == []


class TestTimeline:
    EVENTS = ({"iteration": 20, "layer": 0, "name": "a", "ratio": 0.9, "rule": "start"},
              {"iteration": 50, "layer": 3, "name": "b", "ratio": None, "rule": "manual"})  # fmt: skip

    def test_stretches_run_from_the_first_iteration_to_the_last(self) -> None:
        found = timeline(study((0.89, 0.3), events=[list(self.EVENTS)]))
        assert found is not None
        assert [(s.begin, s.end, s.layer) for s in found.rows[0].stretches] == [(0, 20, -1), (20, 50, 0), (50, 100, 3)]
        assert "stopped through a (start, ratio 0.9000)" in found.rows[0].stretches[1].label
        assert "stopped through b (manual)" in found.rows[0].stretches[2].label
        assert (found.total_steps, found.last_layer) == (100, 3)

    @given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 9)), max_size=6))
    def test_any_events_give_stretches_without_gaps_that_never_start_training_again(self, events: list[Any]) -> None:
        data = one_trial()
        stops = json.dumps([{"iteration": i, "layer": n} for i, n in events])
        found = timeline(replace(data, ranking=data.ranking.assign(stop_events=stops)))
        assert (found is None) == (not events)
        if found is not None:
            stretches = found.rows[0].stretches
            assert stretches[0].begin == 0
            assert stretches[-1].end == found.total_steps
            assert all(a.end == b.begin and a.layer <= b.layer for a, b in pairwise(stretches))

    def test_outcomes_alike_are_one_row_and_the_rest_is_counted(self) -> None:
        events: list[list[dict[str, Any]]] = [list(self.EVENTS), list(self.EVENTS), []]
        found = timeline(study((0.89, 0.3), (0.89, 0.3), (0.89, 0.0), events=events))
        assert found is not None
        assert [row.name for row in found.rows] == ["1 +1 · 30.0 %"]
        assert found.without == 1
        many = [(0.89, 0.001 * n) for n in range(1, MOST_ROWS + 6)]
        found = timeline(study(*many, events=[[self.EVENTS[0]]] * len(many)))
        assert found is not None
        assert (len(found.rows), found.hidden) == (MOST_ROWS, 5)
        assert found.rows[0].name.endswith("3.5 %")

    @pytest.mark.parametrize("text", ["", "no JSON", "{}", "[1, 2]", '[{"layer": 1}]', None])
    def test_events_that_cannot_be_read_are_no_stops(self, text: str | None) -> None:
        data = study((0.89, 0.3))
        assert timeline(replace(data, ranking=data.ranking.assign(stop_events=text))) is None


class TestVariance:
    def test_lines_by_layer_and_whether_they_were_examined(self) -> None:
        found = variance(report_data(10))
        assert found is not None
        assert len(found.layers) == 6
        assert [line.place for line in found.lines if line.examined][:4] == pytest.approx([0, 0.2, 0.4, 0.6])
        assert len(found.stops) == 3
        assert max(i for line in found.lines for i in line.iteration) < STEPS

    def test_a_long_run_is_thinned_and_keeps_its_end(self) -> None:
        frame = pd.DataFrame({"iteration": np.arange(100_001), "layer": "w", "ratio": 1.0})
        found = variance(replace(report_data(5), variance=frame, stops=None, thresholds=None))
        assert found is not None
        assert len(found.lines[0].iteration) <= 402
        assert found.lines[0].iteration[-1] == 100_000

    def test_a_layer_that_vanishes_does_not_squeeze_what_decides(self) -> None:
        frame = pd.DataFrame({"iteration": [0, 1, 2], "layer": "w", "ratio": [1.0, 0.99, 0.001]})
        stops = pd.DataFrame({"iteration": [1], "layer": ["w"], "ratio": [0.99]})
        found = variance(replace(report_data(5), variance=frame, stops=stops, thresholds=None))
        assert found is not None
        assert 0.9 < found.y_range[0] < 0.99
        assert found.y_range[1] > 1

    def test_thresholds_too_near_for_two_texts_share_one(self) -> None:
        thresholds = [("CAC_VAR_START_THR", 0.9), ("CAC_VAR_MT_THR", 0.96), ("CAC_VAR_SLOPE_THR", 0.961)]
        assert near_thresholds(thresholds, (0.8, 1.0)) == [
            ("START_THR 0.9", 0.9),
            ("MT_THR 0.96, SLOPE_THR 0.961", 0.961),
        ]
