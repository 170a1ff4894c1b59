"""What trials are ranked by: compute of training, of inference, with and without zeros, or the mean of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from compressed import dense, frame_of, pruned
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis
from analysis.metrics.ranking import SHORTER, beats_shorter, control_line
from analysis.metrics.saving import quality_of, saved_of, saved_of_one, saving_of
from trainables.errors import UserError
from trainables.savings import SAVINGS

share = st.one_of(st.none(), st.integers(-4, 8).map(lambda eighths: eighths / 8))
rows = st.lists(st.tuples(st.sampled_from([None, *SAVINGS]), share, share), max_size=12)


def by_hand(saving: str | None, training: float | None, inference: float | None) -> float:
    known = {
        None: training, "training": training, "inference": inference,
        "both": None if training is None or inference is None else (training + inference) / 2,
    }.get(saving)  # these rows have neither times nor zeros  # fmt: skip
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


def test_zeros_count_where_they_are_said_to() -> None:
    trials = pd.DataFrame({
        "saving": ["inference", "sparse-inference", "both", "both-sparse"], "compute_saved": 0.25,
        "inference_saved": 0.5, "sparse_inference_saved": 0.75,
    })  # fmt: skip
    assert saved_of(trials).tolist() == [0.5, 0.75, 0.375, 0.5]
    assert [saved_of_one(row) for _, row in trials.iterrows()] == [0.5, 0.75, 0.375, 0.5]


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


@pytest.mark.parametrize(("saving", "judged"), [("training", True), ("inference", False), ("both", False)])
def test_training_shorter_is_a_rival_of_training_compute_alone(saving: str, judged: bool) -> None:
    shorter = {**dense(0.96, saving=saving), "role": "control", "control": SHORTER}
    shorter["row"] = {**shorter["row"], "compute_saved": 0.5}
    trials = frame_of(pruned(0.969, 0.4, 0.3, saving=saving), shorter, saving=saving)
    beats = beats_shorter(trials, control_line(trials))
    assert len(control_line(trials)) == 2
    assert beats.notna().tolist() == [False, judged, False]


# --- a metric to minimise is the mirror image of one to maximise ------------------------------------------------------


VALUES = st.integers(-8, 8).map(lambda value: value / 4)
ROWS = st.lists(st.tuples(VALUES, st.integers(0, 8).map(lambda value: value / 10)), min_size=1, max_size=12)


def frame(rows: list[tuple[float, float]], *, gain: bool, roles: list[str] | None = None) -> pd.DataFrame:
    """Trials with a metric to maximise, ``gain``, or its negative to minimise, ``cost``; the first is the baseline."""
    sign, name = (1, "gain") if gain else (-1, "cost")
    roles = roles or ["baseline", *["search"] * (len(rows) - 1)]
    return pd.DataFrame(
        {
            "trial": range(len(rows)), "role": roles, "status": "completed", "seed": 0, "epochs": 10,
            "control": ["shorter" if role == "control" else None for role in roles],
            name: [sign * value for value, _ in rows], "compute_saved": [saved for _, saved in rows],
            "metric": name, "direction": "max" if gain else "min", "metric_unit": "",
        }
    )  # fmt: skip


@settings(max_examples=25)
@given(ROWS, st.sampled_from([0.0, 0.5, "20%"]))
def test_rankings_and_fronts_are_mirror_images(rows: list[tuple[float, float]], allowed: float | str) -> None:
    rows = [(rows[0][0], 0.0), *rows[1:]]
    gain, cost = (analysis.rank(frame(rows, gain=up), allowed_drop=allowed) for up in (True, False))
    assert gain["trial"].tolist() == cost["trial"].tolist()
    assert gain["gain"].tolist() == [-value for value in cost["cost"]]
    for first, second in (("gain_drop", "cost_drop"), ("within_drop", "within_drop"), ("on_front", "on_front")):
        assert gain[first].tolist() == cost[second].tolist(), first
    limit = allowed if isinstance(allowed, float) else 0.2 * abs(rows[0][0])
    inside = {place for place, (value, _) in enumerate(rows) if rows[0][0] - value <= limit + 1e-9}
    assert set(cost.loc[cost["within_drop"], "trial"]) == inside


@settings(max_examples=25)
@given(ROWS, ROWS)
def test_lines_of_controls_are_mirror_images(
    controls: list[tuple[float, float]], rows: list[tuple[float, float]]
) -> None:
    roles = ["baseline", *["control"] * len(controls), *["search"] * len(rows)]
    both = [(1.0, 0.0), *controls, *rows]
    up, down = (frame(both, gain=gain, roles=roles) for gain in (True, False))
    lines = [analysis.control_line(side) for side in (up, down)]
    assert lines[0]["trial"].tolist() == lines[1]["trial"].tolist()
    reached = [analysis.accuracy_when_shorter(line, up["compute_saved"]) for line in lines]
    np.testing.assert_allclose(reached[0], -reached[1])
    beats = [analysis.beats_shorter(side, line) for side, line in zip((up, down), lines, strict=True)]
    assert beats[0].fillna("-").tolist() == beats[1].fillna("-").tolist()


def test_confirmations_are_mirror_images() -> None:
    generator = np.random.default_rng(0)
    tables = []
    values = generator.normal(5.0, 0.1, 15)
    for up in (True, False):
        sign, name = (1, "gain") if up else (-1, "cost")
        trials = pd.DataFrame(
            {
                "role": ["baseline"] * 5 + ["candidate"] * 10, "candidate": [None] * 5 + [3] * 5 + [4] * 5,
                "seed": [1, 2, 3, 4, 5] * 3, "status": "completed", name: sign * values,
                "compute_saved": [0.0] * 5 + [0.3] * 10, "metric": name, "direction": "max" if up else "min",
                "metric_unit": "",
            }
        )  # fmt: skip
        tables.append(analysis.confirm_table(trials, allowed_drop="10%"))
    up_table, down_table = tables
    assert up_table["confirmed"].tolist() == down_table["confirmed"].tolist() == [True, True]
    for column in ("drop_low", "drop_high"):
        np.testing.assert_allclose(up_table[column], down_table[column])
    np.testing.assert_allclose(up_table["gain_drop"], down_table["cost_drop"])
    assert down_table["compared"].unique().tolist() == ["cost"]


def test_the_metric_is_read_from_the_rows() -> None:
    assert quality_of(frame([(1.0, 0.0)], gain=False)).sign == -1
    assert quality_of(None).is_accuracy
    mixed = pd.concat([frame([(1.0, 0.0)], gain=up) for up in (True, False)])
    with pytest.raises(UserError, match="trials must be of one metric to be compared, got cost, gain: pick"):
        analysis.rank(mixed)
