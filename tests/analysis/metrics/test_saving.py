"""What trials are ranked by: training compute, inference compute, or the mean of both."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compressed import dense, frame_of, pruned
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis
from analysis.metrics.ranking import SHORTER, beats_shorter, control_line
from analysis.metrics.saving import saved_of, saved_of_one, saving_of
from trainables.savings import SAVINGS

share = st.one_of(st.none(), st.integers(-4, 8).map(lambda eighths: eighths / 8))
rows = st.lists(st.tuples(st.sampled_from([None, *SAVINGS]), share, share), max_size=12)


def by_hand(saving: str | None, training: float | None, inference: float | None) -> float:
    known = {
        None: training, "training": training, "inference": inference,
        "both": None if training is None or inference is None else (training + inference) / 2,
        "time": None,  # these rows have no times
    }[saving]  # fmt: skip
    return float("nan") if known is None else known


@pytest.mark.slow
@settings(max_examples=60)
@given(rows, st.booleans())
def test_each_row_by_its_own_saving(given_rows: list[tuple[Any, Any, Any]], plain: bool) -> None:
    trials = pd.DataFrame(given_rows, columns=["saving", "compute_saved", "inference_saved"], dtype="object")
    if not plain:  # as a study's frame has them
        trials = trials.astype({"saving": "string", "compute_saved": "float64", "inference_saved": "float64"})
    expected = [by_hand(*row) for row in given_rows]
    np.testing.assert_array_equal(saved_of(trials).to_numpy(), np.array(expected, dtype=float))
    assert saved_of(trials).dtype == "float64"
    np.testing.assert_array_equal([saved_of_one(row) for _, row in trials.iterrows()], np.array(expected, dtype=float))


def test_what_a_study_ranks_by_is_said_by_its_first_trial_that_knows() -> None:
    assert saving_of(None) == saving_of(pd.DataFrame({"trial": [1]})) == "training"
    assert saving_of(pd.DataFrame({"saving": pd.Series([None, "inference", "both"], dtype="string")})) == "inference"
    assert saving_of(frame_of(pruned(0.97, 0.5)).iloc[1]) == "inference"


#: Accuracy, inference saved, training saved; all within half a point but the last.
OUTCOMES = [(0.968, 0.2, 0.6), (0.969, 0.5, 0.1), (0.966, 0.45, 0.4), (0.9, 0.9, 0.9)]


@pytest.mark.parametrize(
    ("saving", "order", "front"),
    [
        ("training", [1, 3, 2, 0, 4], {0, 1, 2, 4}),
        ("inference", [2, 3, 1, 0, 4], {0, 2, 4}),
        ("both", [3, 1, 2, 0, 4], {0, 1, 2, 3, 4}),
    ],
)
def test_ranking_best_and_fronts_are_of_what_the_study_ranks_by(saving: str, order: list[int], front: set[int]) -> None:
    trials = frame_of(*(pruned(*outcome, saving=saving) for outcome in OUTCOMES), saving=saving)
    ranking = analysis.rank(trials)
    assert ranking["trial"].tolist() == order
    best = analysis.best(ranking)
    assert best is not None
    assert best["trial"] == order[0]
    assert set(ranking.loc[ranking["on_front"], "trial"]) == front
    assert set(analysis.pareto_front(trials)["trial"]) == front
    # The area that the front dominates above nothing saved at five points less than the baseline, cell by cell.
    reached = [(0.97, 0.0)] + [(a, by_hand(saving, t, i)) for a, i, t in OUTCOMES]
    edges = sorted({a for a, _ in reached if a > 0.92} | {0.92})
    area = sum((high - low) * max(s for a, s in reached if a >= high) for low, high in pairwise(edges))
    assert analysis.front_hypervolume(trials) == pytest.approx(area)
    worth = analysis.rank(trials, price=0.1).set_index("trial")["worth"]
    accuracy, inference, training = OUTCOMES[2]
    assert worth[3] == pytest.approx(by_hand(saving, training, inference) - 0.1 * (0.97 - accuracy) / 0.01)


@pytest.mark.parametrize(("saving", "judged"), [("training", True), ("inference", False), ("both", False)])
def test_training_shorter_is_a_rival_of_training_compute_alone(saving: str, judged: bool) -> None:
    shorter = {**dense(0.96, saving=saving), "role": "control", "control": SHORTER}
    shorter["row"] = {**shorter["row"], "compute_saved": 0.5}
    trials = frame_of(pruned(0.969, 0.4, 0.3, saving=saving), shorter, saving=saving)
    beats = beats_shorter(trials, control_line(trials))
    assert len(control_line(trials)) == 2
    assert beats.notna().tolist() == [False, judged, False]
