"""The line that a setting has to beat: simply training shorter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.controls import RANDOM_STOPS, SHORTER, accuracy_when_shorter, beats_shorter, control_line


def frame(*rows: tuple[str, str | None, float, float], status: str = "completed") -> pd.DataFrame:
    columns = ["role", "control", "compute_saved", "accuracy"]
    found = pd.DataFrame(rows, columns=columns)
    found["control"] = found["control"].astype("string")
    return found.assign(trial=range(len(found)), epochs=30, status=status)


STUDY = frame(
    ("baseline", None, 0.0, 0.97),
    ("search", None, 0.1, 0.968),
    ("search", None, 0.3, 0.955),
    ("search", None, 0.6, 0.96),
    ("search", None, 0.0, 0.97),
    ("control", SHORTER, 0.5, 0.95),
    ("control", SHORTER, 0.2, 0.96),
    ("control", RANDOM_STOPS, 0.3, 0.96),
)


def test_the_line_goes_through_the_baseline_and_the_shorter_trainings_alone() -> None:
    line = control_line(STUDY)
    assert line["trial"].tolist() == [0, 6, 5]
    assert accuracy_when_shorter(line, [0.0, 0.1, 0.2, 0.35, 0.5]).tolist() == pytest.approx(
        [0.97, 0.965, 0.96, 0.955, 0.95]
    )
    assert np.isnan(accuracy_when_shorter(line, [0.51])).all()


def test_who_beats_it() -> None:
    beats = beats_shorter(STUDY, control_line(STUDY))
    # 0.968 > 0.965; 0.955 < 0.9567; beyond the line; saves nothing; points of the line; random stops are judged, too.
    assert [None if pd.isna(b) else bool(b) for b in beats] == [None, True, False, None, None, None, None, True]


def test_a_shorter_training_that_is_better_counts_for_all_that_save_less() -> None:
    trials = frame(
        ("baseline", None, 0.0, 0.97), ("control", SHORTER, 0.2, 0.9), ("control", SHORTER, 0.4, 0.98),
        ("search", None, 0.1, 0.975),
    )  # fmt: skip
    line = control_line(trials)
    assert accuracy_when_shorter(line, [0.1, 0.2, 0.4]).tolist() == [0.98] * 3
    assert not beats_shorter(trials, line).iloc[3]


@pytest.mark.parametrize("missing", ["baseline", "shorter", "column", "completed"])
def test_without_a_line_nothing_is_said(missing: str) -> None:
    trials = STUDY.copy()
    if missing == "baseline":
        trials = trials[trials["role"] != "baseline"]
    elif missing == "shorter":
        trials = trials[trials["control"].fillna("") != SHORTER]
    elif missing == "column":
        trials = trials.drop(columns="control")
    else:
        trials["status"] = "failed"
    line = control_line(trials)
    assert len(line) == 0
    assert beats_shorter(trials, line).isna().all()


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.lists(st.integers(0, 100), min_size=1, max_size=5),
)
def test_against_the_definition(points: list[tuple[int, int]], wanted: list[int]) -> None:
    """Point by point: the straight line between neighbours, and everybody who saves at least as much."""
    rows: list[Any] = [("baseline", None, 0.0, 0.5)]
    rows += [("control", SHORTER, saved / 10, accuracy / 10) for saved, accuracy in points]
    line = control_line(frame(*rows))
    known = sorted((saved, accuracy) for _, _, saved, accuracy in rows)
    for saved, found in zip(wanted, accuracy_when_shorter(line, [w / 100 for w in wanted]), strict=True):
        s = saved / 100
        beyond = [accuracy for at, accuracy in known if at >= s - 1e-9]
        if not beyond:
            assert np.isnan(found)
            continue
        between = [a + (b - a) * (s - at) / (to - at) for (at, a), (to, b) in pairwise(known) if at < s < to]
        assert found == pytest.approx(max(beyond + between))
