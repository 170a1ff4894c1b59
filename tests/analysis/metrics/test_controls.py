"""The line that a setting has to beat: simply training shorter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.metrics.noise import seed_noise
from analysis.metrics.ranking import (
    SHORTER,
    accuracy_when_shorter,
    beats_shorter,
    control_line,
    insignificant_difference,
)


def frame(*rows: tuple[str, str | None, float, float], status: str = "completed") -> pd.DataFrame:
    columns = ["role", "control", "compute_saved", "accuracy"]
    found = pd.DataFrame(rows, columns=columns)
    found["control"] = found["control"].astype("string")
    return found.assign(trial=range(len(found)), epochs=30, status=status)


STUDY = frame(
    ("baseline", None, 0.0, 0.97),
    ("search", None, 0.1, 0.96801),  # a count over 100,000 samples
    ("search", None, 0.3, 0.955),
    ("search", None, 0.6, 0.96),
    ("search", None, 0.0, 0.97),
    ("control", SHORTER, 0.5, 0.95),
    ("control", SHORTER, 0.2, 0.96),
    ("control", "random stops", 0.3, 0.96),  # of an earlier version
)


def test_the_line_goes_through_the_baseline_and_the_shorter_trainings_alone() -> None:
    line = control_line(STUDY)
    assert line["trial"].tolist() == [0, 6, 5]
    assert accuracy_when_shorter(line, [0.0, 0.1, 0.2, 0.35, 0.5]).tolist() == pytest.approx(
        [0.97, 0.965, 0.96, 0.955, 0.95]
    )
    assert np.isnan(accuracy_when_shorter(line, [0.51])).all()


#: Training shorter reaches 570 of 600 samples at a saving of 0.3: one seed's accuracy varies by a few samples there.
SMALL = frame(
    ("baseline", None, 0.0, 580 / 600), ("control", SHORTER, 0.2, 571 / 600), ("control", SHORTER, 0.4, 569 / 600),
    *(("search", None, 0.3, right / 600) for right in (571, 570, 569, 563, 581, 577, 559, 600)),
)  # fmt: skip


def test_a_sample_or_what_a_seed_changes_decides_nothing() -> None:
    line = control_line(SMALL)
    assert line.attrs["resolution"] == 1 / 600
    # e = 0.05 and n = 600: a seed changes sqrt(e / n) = 0.0091, 5.5 samples of 600; with fewer errors a little less.
    assert insignificant_difference(line, 0.95) == pytest.approx((0.05 / 600) ** 0.5)
    found = beats_shorter(SMALL, line).tolist()[3:]
    assert found == ["alike"] * 3 + ["behind", "ahead", "ahead", "behind", "ahead"]


@pytest.mark.parametrize(
    ("norms", "factor", "first"), [(None, None, 0), ("hold_all", None, 1), ("hold_all", 2.0, 3), ("go_on", 2.0, 2)]
)
def test_the_line_begins_at_a_dense_run_that_trained_alike(norms: str | None, factor: float | None, first: int) -> None:
    settings = [(None, None), ("hold_all", 1.0), ("go_on", 2.0), ("hold_all", 2.0), (norms, factor)]
    roles = [("baseline", None), *[("search", None)] * 3, ("control", SHORTER)]
    trials = frame(*((*role, 0.4 * (role[0] == "control"), 0.9 + n / 100) for n, role in enumerate(roles)))
    trials["CAC_NORM_STATISTICS"], trials["CAC_LR_FACTOR"] = zip(*settings, strict=True)
    trials["CAC_VAR_START_THR"] = [None, -1, -1, -1, -1 if norms else None]
    assert control_line(trials)["trial"].tolist() == [first, 4]
    alike = trials.iloc[[first]].assign(role="control", control="other seed", seed=1001, epochs=15, trial=9)
    assert control_line(pd.concat([alike, trials], ignore_index=True))["trial"].tolist() == [first, 4]
    alone = trials.drop(index=first) if first else trials
    assert control_line(alone)["trial"].tolist() == ([] if first else [0, 4])


def test_one_sample_is_the_least_difference_that_counts() -> None:
    # Where nothing is wrong, no seed changes anything by that estimate; half a sample of the line is still nothing.
    trials = frame(
        ("baseline", None, 0.0, 1.0), ("control", SHORTER, 0.4, 599 / 600), ("search", None, 0.2, 1.0)
    )  # fmt: skip
    line = control_line(trials)
    assert accuracy_when_shorter(line, [0.2]).tolist() == [pytest.approx(1199 / 1200)]
    assert insignificant_difference(line, 1.0) == pytest.approx(1 / 600)
    assert beats_shorter(trials, line).iloc[2] == "alike"


def test_the_noise_of_a_seed_against_calibrated_networks_that_err_at_random() -> None:
    """Of each sample a share q of networks say class 1, and class 1 is right for a share q of such samples."""
    rng = np.random.default_rng(0)
    samples, networks = 500, 4000
    says = rng.beta(0.2, 0.2, samples)
    right = np.where(rng.random(samples) < says, says, 1 - says)
    accuracies = (rng.random((networks, samples)) < right).mean(axis=1)
    measured = np.diff(accuracies.reshape(-1, 2), axis=1).std()
    assert measured == pytest.approx(float(seed_noise(accuracies.mean(), 1 / samples)), rel=0.1)
    # As many errors that are as likely on every sample vary most.
    even = (rng.random((networks, samples)) < 0.2).mean(axis=1)
    assert np.diff(even.reshape(-1, 2), axis=1).std() == pytest.approx(float(seed_noise(0.2, 1 / samples)), rel=0.1)


@pytest.mark.slow
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
