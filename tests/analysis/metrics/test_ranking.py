"""Ranking and Pareto front against brute force on random data, and the area of plain numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import result_row

import analysis
from analysis.io.studies import to_frame
from analysis.metrics.pareto import hypervolume, non_dominated
from trainables.errors import UserError

#: Few distinct values, so that ties of every kind occur.
grid = st.integers(0, 6).map(lambda v: v / 8)
outcomes = st.lists(st.tuples(grid, grid, st.sampled_from(["completed"] * 4 + ["failed", "running"])), max_size=25)


def frame(rows: list[tuple[float, float, str]], baseline: float | None = 0.5) -> pd.DataFrame:
    """Trials with accuracy, compute saved and status; the first is the baseline."""
    records = [] if baseline is None else [(baseline, 0.0, "completed")]
    records += rows
    return pd.DataFrame(
        {
            "trial": np.arange(len(records), dtype="int64"),
            "role": ["baseline" if i == 0 and baseline is not None else "search" for i in range(len(records))],
            "status": [r[2] for r in records],
            "seed": 0,
            "accuracy": [r[0] if r[2] == "completed" else np.nan for r in records],
            "test_accuracy": [r[0] for r in records],
            "compute_saved": [r[1] if r[2] == "completed" else np.nan for r in records],
            "train_time_s": 1.0,
        }
    )


@pytest.mark.slow
@settings(max_examples=30)
@given(outcomes, st.integers(0, 4).map(lambda v: v / 8))
def test_ranking_is_the_documented_order(rows: list[tuple[float, float, str]], allowed: float) -> None:
    trials = frame(rows)
    ranking = analysis.rank(trials, allowed_drop=allowed)

    def key(row: tuple[int, float, float]) -> tuple[object, ...]:
        number, accuracy, saved = row
        drop = 0.5 - accuracy
        return (0, -saved, -accuracy, number) if drop <= allowed else (1, drop, -accuracy, number)

    done = [(r.trial, r.accuracy, r.compute_saved) for r in trials.itertuples() if r.status == "completed"]
    assert list(ranking["trial"]) == [row[0] for row in sorted(done, key=key)]
    assert list(ranking["rank"]) == list(range(1, len(done) + 1))
    assert list(ranking["within_drop"]) == [0.5 - a <= allowed for a in ranking["accuracy"]]
    front = {
        number
        for number, accuracy, saved in done
        if not any(a >= accuracy and s >= saved and (a, s) != (accuracy, saved) for _, a, s in done)
    }
    assert set(ranking.loc[ranking["on_front"], "trial"]) == front
    best = analysis.best(ranking)
    feasible = [row for row in done if 0.5 - row[1] <= allowed]
    assert best is not None  # the baseline itself is always within
    assert best["compute_saved"] == max(row[2] for row in feasible)


def test_exactly_the_allowed_drop_is_within() -> None:
    # 583/599 - 580/599 is not 3/599 in binary.
    trials = frame([(580 / 599, 0.5, "completed")], baseline=583 / 599)
    assert analysis.rank(trials, allowed_drop=3 / 599)["within_drop"].all()


@pytest.mark.parametrize("drop", [-0.1, 1.0, float("nan")])
def test_the_allowed_drop_is_a_fraction(drop: float) -> None:
    with pytest.raises(UserError, match=r"the allowed accuracy loss must be a fraction in \[0, 1\), such as 0.005"):
        analysis.rank(frame([]), allowed_drop=drop)


def test_what_has_no_result_is_neither_ranked_nor_on_a_front() -> None:
    trials = frame([(0.9, 0.9, "completed")] * 5)
    trials["status"] = ["completed", "failed", "pruned", "interrupted", "running", "completed"]
    assert analysis.rank(trials)["trial"].tolist() == [5, 0]
    assert analysis.rank(trials)["on_front"].tolist() == [True, False]


def test_controls_are_left_out() -> None:
    trials = frame([(0.5, 0.3, "completed"), (0.5, 0.4, "completed")])
    trials["role"] = ["baseline", "search", "control"]
    assert analysis.rank(trials)["trial"].tolist() == [1, 0]
    assert analysis.rank(trials)["on_front"].tolist() == [True, False]


def record(number: int, *, stage: str = "", status: str = "completed", **config: object) -> dict[str, object]:
    """A trial as the journal gives it."""
    row = result_row(0.97, 0.1, stage=stage, train_loss=0.1 + number) if status == "completed" else {}
    role = "search" if number else "baseline"
    return {"trial": number, "role": role, "status": status, "error": None, "row": row, "config": config}


def test_a_duplicate_names_the_earliest_trial_that_trained_the_same() -> None:
    same = {"method": "gradskip", "seed": 0, "CAC_VAR_START_THR": 0.97}
    trials = to_frame(
        [
            record(0, stage="a", method="none", seed=0),
            record(1, status="failed", **same),
            record(2, **same),
            record(3, stage="b", **(same | {"CAC_VAR_START_THR": 0.96})),
            record(4, **same),
            record(5, **(same | {"seed": 1})),
            record(6, stage="b", **(same | {"CAC_VAR_START_THR": 0.95})),
            record(7, stage="a", **(same | {"CAC_VAR_START_THR": 0.5})),
            record(8, **(same | {"CAC_VAR_START_ITR": 5})),
            record(9, **(same | {"CAC_VAR_START_THR": 0.95})),  # settings of 6, which trained what 3 did
        ]
    ).sample(frac=1, random_state=0)
    found = analysis.rank(trials).set_index("trial")["duplicate_of"]
    assert found.dtype == "Int64"
    assert found.dropna().to_dict() == {4: 2, 6: 3, 7: 0, 9: 3}


def test_duplicates_are_told_within_a_study_alone_and_not_by_a_seed() -> None:
    one = to_frame([record(0, stage="a", method="none", seed=0), record(1, method="gradskip", seed=0)])
    two = one.assign(study="two")
    both = analysis.rank(pd.concat([one.assign(study="one"), two, two.assign(trial=[2, 3])]))
    assert both.dropna(subset="duplicate_of").set_index(["study", "trial"])["duplicate_of"].to_dict() == {
        ("two", 2): 0,
        ("two", 3): 1,
    }
    assert analysis.rank(frame([(0.5, 0.1, "completed")] * 3))["duplicate_of"].isna().all()


#: Few distinct numbers, so that ties of every kind occur.
few = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0, math.inf])
whole = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(few, few), max_size=25))
def test_the_front_is_what_no_other_row_dominates(rows: list[tuple[float, float]]) -> None:
    expected = [not any(x >= a and y >= b and (x > a or y > b) for x, y in rows) for a, b in rows]
    assert non_dominated(rows).tolist() == expected


@given(st.lists(st.tuples(whole, whole), max_size=8), st.tuples(st.integers(-1, 3), st.integers(-1, 3)))
def test_the_hypervolume_is_the_number_of_dominated_unit_cells(
    rows: list[tuple[float, float]], reference: tuple[int, int]
) -> None:
    cells = 0
    for corner in itertools.product(*(range(low, 4) for low in reference)):
        # The cell reaches from the corner one unit up in both columns.
        cells += any(x >= corner[0] + 1 and y >= corner[1] + 1 for x, y in rows)
    assert hypervolume(np.array(rows), reference) == pytest.approx(cells)
