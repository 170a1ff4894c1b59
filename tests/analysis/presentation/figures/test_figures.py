"""The plots' numbers and texts against counting by hand."""

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
from report_data import report_data
from studies import result_row

from analysis.io.studies import to_frame
from analysis.metrics.ranking import best, rank
from analysis.presentation.figures.figure import Bars, Figure, Points
from analysis.presentation.figures.outcomes import pareto
from analysis.presentation.figures.palette import DARK, LIGHT
from analysis.presentation.figures.report_figures import MOST_ROWS, timeline
from analysis.presentation.figures.sensitivity import sensitivity
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
    empty: dict[str, Any] = dict.fromkeys(("controls", "confirmation"))
    given = {"trials": trials, "ranking": ranking, "best": best(ranking), "allowed_drop": 0.01, **empty}
    return ReportData(**{**vars(_template()), **given})


@cache
def _template() -> ReportData:
    return report_data(3)


@cache
def one_trial() -> ReportData:
    return study((0.89, 0.3))


def trace(figure: Figure | None, name: str) -> Points:
    """The trace of this name."""
    assert figure is not None
    (found,) = [trace for trace in figure.traces if isinstance(trace, Points) and trace.name == name]
    return found


def places(figure: Figure | None, name: str) -> list[tuple[float, float]]:
    """The points of the trace of this name."""
    found = trace(figure, name)
    return list(zip(found.x, found.y, strict=True))


class TestPareto:
    def test_places_of_all_kinds(self) -> None:
        found = pareto(study((0.89, 0.3), (0.85, 0.2), (0.88, 0.4)))
        assert found is not None
        assert places(found, "baseline") == [(0, 90)]
        assert sorted(places(found, "trials")) == [(20, 85), (30, 89), (40, 88)]
        assert places(found, "Pareto front") == [(0, 90), (30, 89), (40, 88)]
        assert places(found, "chosen") == [(30, 89)]
        assert found.limits == {"allowed accuracy loss": pytest.approx(89)}
        assert found.alt == (
            "Compute saved against validation accuracy of 3 searched trials. The Pareto front has 3 outcomes, "
            "reaching 40.0 % compute saved at 88.00 % accuracy."
        )

    def test_controls_draw_a_line_from_the_baseline(self) -> None:
        controls = pd.DataFrame(
            {"control": ["shorter", "random stops", "shorter", "shorter"], "compute_saved": [0.5, 0.3, 0.2, np.nan],
             "accuracy": [0.8, 0.7, 0.88, 0.9]}
        )  # fmt: skip
        found = pareto(replace(study((0.89, 0.3)), controls=controls))
        assert places(found, "cut dense runs") == [(0, 90), (20, 88), (50, 80)]


def stretches(figure: Figure, row: int) -> list[tuple[int, int, str, str]]:
    """One outcome's stretches: begin, end, colour, hover text."""
    (found,) = figure.traces
    assert isinstance(found, Bars)
    rows = zip(found.rows, found.begins, found.lengths, found.colours, found.labels, strict=True)
    return sorted(
        (int(begin), int(begin + length), colour, label) for y, begin, length, colour, label in rows if y == row
    )


class TestTimeline:
    EVENTS = ({"iteration": 20, "layer": 0, "name": "a", "ratio": 0.9, "rule": "start"},
              {"iteration": 50, "layer": 3, "name": "b", "ratio": None, "rule": "manual"})  # fmt: skip

    def test_stretches_run_from_the_first_iteration_to_the_last(self) -> None:
        found = timeline(study((0.89, 0.3), events=[list(self.EVENTS)]))
        assert found is not None
        bars = stretches(found, 0)
        assert [bar[:3] for bar in bars] == [(0, 20, "@rest"), (20, 50, "@depth:0.000"), (50, 100, "@depth:1.000")]
        assert "stopped through a (start, ratio 0.9000)" in bars[1][3]
        assert "stopped through b (manual)" in bars[2][3]
        assert found.x.range == (0, 100)
        assert found.swatches == {f"up to layer {n}": f"@depth:{n / 3:.3f}" for n in range(4)}

    @pytest.mark.slow
    @given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 9)), max_size=6))
    def test_any_events_give_stretches_without_gaps_that_never_start_training_again(self, events: list[Any]) -> None:
        data = one_trial()
        stops = json.dumps([{"iteration": i, "layer": n} for i, n in events])
        found = timeline(replace(data, ranking=data.ranking.assign(stop_events=stops)))
        assert (found is None) == (not events)
        if found is not None:
            bars = stretches(found, 0)
            assert bars[0][0] == 0
            assert bars[-1][1] == found.x.range[1]
            depths = [-1.0 if colour == "@rest" else float(colour.removeprefix("@depth:")) for _, _, colour, _ in bars]
            assert depths == sorted(depths)
            assert all(end == begin for (_, end, *_), (begin, *_) in pairwise(bars))

    def test_outcomes_alike_are_one_row_and_the_rest_is_counted(self) -> None:
        events: list[list[dict[str, Any]]] = [list(self.EVENTS), list(self.EVENTS), []]
        found = timeline(study((0.89, 0.3), (0.89, 0.3), (0.89, 0.0), events=events))
        assert found is not None
        assert found.y.names == ["1 +1 · 30.0 %"]
        assert found.notes[1:] == ["1 ranked trial stopped nothing."]
        many = [(0.89, 0.001 * n) for n in range(1, MOST_ROWS + 6)]
        found = timeline(study(*many, events=[[self.EVENTS[0]]] * len(many)))
        assert found is not None
        assert found.notes[1:] == ["5 more outcomes not shown."]
        assert len(found.y.names) == MOST_ROWS
        assert found.y.names[0].endswith("3.5 %")

    @pytest.mark.parametrize("text", ["", "[]", None])
    def test_without_events_there_is_no_timeline(self, text: str | None) -> None:
        data = study((0.89, 0.3))
        assert timeline(replace(data, ranking=data.ranking.assign(stop_events=text))) is None


@pytest.mark.slow
@pytest.mark.thorough
def test_a_trial_at_hundreds_of_dense_runs_does_not_squash_the_others() -> None:
    """The axis ends at three times the median of what costs more; the note counts what lies left of it."""
    figure = pareto(study((0.89, 0.3), (0.91, -0.5), (0.92, -1.2), (0.93, -250.0), (0.92, -30.0)))
    assert figure is not None
    low, high = figure.x.range
    assert -120.0 > low > -3 * 1560.0 * 1.2
    assert high > 30.0
    assert any(
        note.startswith("1 trial lies left of it, at many times the dense run's compute") for note in figure.notes
    )
    assert (-25_000.0, pytest.approx(93.0)) in places(figure, "trials")
    for outcomes in ([(0.89, 0.3)], [(0.91, -3.0), (0.92, -2.0)], [(0.91, -250.0), (0.92, -240.0)]):
        assert pareto(study(*outcomes)).x.range is None  # type: ignore[union-attr]


# --- sensitivity analysis ---------------------------------------------------------------------------------------------


def curves(layers: int) -> dict[str, list[tuple[float, float]]]:
    return {f"block.{i}.conv.weight": [(0.0, 0.9), (0.5, 0.9 - 0.01 * i), (0.95, 0.1)] for i in range(layers)}


def test_a_line_a_layer_in_percent() -> None:
    figure = sensitivity(curves(3), allowed_drop=0.02, pruned="filters")
    lines = [trace for trace in figure.traces if isinstance(trace, Points)]
    assert [line.name for line in lines] == ["block.0.conv", "block.1.conv", "block.2.conv"]
    assert lines[2].x == [0, 50, 95]
    assert lines[2].y == pytest.approx([90, 88, 10])
    assert lines[2].labels[1] == "block.2.conv.weight\n50 % pruned: 88.00 %"
    assert figure.x.title == "filters pruned of one layer (%)"
    assert figure.y.title == "accuracy (%)"
    assert figure.limits == {"allowed accuracy loss (2.00 points)": pytest.approx(88)}


# --- contrasts that text and marks need (WCAG 2.2, 1.4.3 and 1.4.11) --------------------------------------------------


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, in [1, 21] (WCAG 2.2, definitions)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_stand_out(colours: dict[str, str]) -> None:
    for ground in ("ground", "panel"):
        for text in ("text", "faint", "link"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("trial", "front", "chosen", "control", "published", "limit", "focus"):
        assert contrast(colours[mark], colours["ground"]) >= 3, mark
