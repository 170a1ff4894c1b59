"""Ranking and Pareto front against brute force on random data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis
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


@given(outcomes)
def test_the_front_is_what_no_other_trial_dominates(rows: list[tuple[float, float, str]]) -> None:
    trials = frame(rows)
    done = [(r.trial, r.accuracy, r.compute_saved) for r in trials.itertuples() if r.status == "completed"]
    expected = {
        t for t, a, s in done if not any((b >= a and u >= s and (b > a or u > s)) for _, b, u in done)
    }  # fmt: skip
    assert set(analysis.pareto_front(trials)["trial"]) == expected


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
    assert set(ranking.loc[ranking["on_front"], "trial"]) == set(analysis.pareto_front(trials)["trial"])
    best = analysis.best(ranking)
    feasible = [row for row in done if 0.5 - row[1] <= allowed]
    assert best is not None  # the baseline itself is always within
    assert best["compute_saved"] == max(row[2] for row in feasible)


def test_exactly_the_allowed_drop_is_within() -> None:
    # 583/599 - 580/599 is not 3/599 in binary.
    trials = frame([(580 / 599, 0.5, "completed")], baseline=583 / 599)
    assert analysis.rank(trials, allowed_drop=3 / 599)["within_drop"].all()


def test_without_a_baseline_nothing_is_within() -> None:
    ranking = analysis.rank(frame([(0.9, 0.5, "completed")], baseline=None))
    assert ranking["accuracy_drop"].isna().all()
    assert not ranking["within_drop"].any()
    assert analysis.best(ranking) is None


def test_each_trial_is_compared_with_the_baseline_of_its_own_seed() -> None:
    trials = frame([(0.4, 0.1, "completed"), (0.9, 0.0, "completed"), (0.8, 0.2, "completed")])
    trials["seed"] = [0, 0, 1, 1]
    trials.loc[2, "role"] = "baseline"
    trials["train_time_s"] = [2.0, 1.0, 4.0, 3.0]
    relative = analysis.relative_to_baseline(trials)
    assert relative["accuracy_drop"].tolist() == pytest.approx([0, 0.1, 0, 0.1])
    assert relative["time_saved"].tolist() == pytest.approx([0, 0.5, 0, 0.25])


@pytest.mark.parametrize("drop", [-0.1, 1.0, float("nan")])
def test_the_allowed_drop_is_a_fraction(drop: float) -> None:
    with pytest.raises(UserError, match=r"the allowed drop must be a fraction in \[0, 1\), such as 0.005"):
        analysis.rank(frame([]), allowed_drop=drop)


def test_an_empty_frame_ranks_to_an_empty_frame() -> None:
    empty = frame([], baseline=None)
    assert len(analysis.rank(empty)) == len(analysis.pareto_front(empty)) == 0


@settings(max_examples=5)
@given(st.integers(0, 2**31))
def test_a_hundred_thousand_trials_agree_with_a_simple_sweep(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [(a, s, "completed") for a, s in generator.random((100_000, 2)).round(3)]
    trials = frame(rows)
    front = analysis.pareto_front(trials)
    best_saved: dict[float, float] = {}
    for accuracy, saved in zip(trials["accuracy"], trials["compute_saved"], strict=True):
        best_saved[accuracy] = max(saved, best_saved.get(accuracy, -1.0))
    points, highest = set(), -1.0
    for accuracy in sorted(best_saved, reverse=True):
        if best_saved[accuracy] > highest:
            highest = best_saved[accuracy]
            points.add((accuracy, highest))
    assert set(zip(front["accuracy"], front["compute_saved"], strict=True)) == points
