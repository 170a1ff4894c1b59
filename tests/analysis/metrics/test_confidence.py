"""Intervals against simulation and closed forms; the confirmation table against a count by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import stats

from analysis.metrics.confirmation import (
    confirm_columns,
    confirm_table,
    mean_limits,
    paired_interval,
    shares_of_error,
)
from trainables.errors import UserError
from trainables.quality import ACCURACY

#: Samples drawn for a cell of the table. The standard error of 90 % is then 0.5 points.
SAMPLES = 4000
TEST_SAMPLES = 599


def draws(kind: str, rng: np.random.Generator, n: int) -> tuple[NDArray, float]:
    """Samples of a distribution and its mean."""
    shape = (SAMPLES, n)
    if kind == "normal":
        return rng.normal(size=shape), 0.0
    if kind == "heavy-tailed (t, 3 df)":
        return rng.standard_t(3, size=shape), 0.0
    if kind == "skewed (exponential)":
        return rng.exponential(size=shape), 1.0
    return (rng.poisson(1, shape) - rng.poisson(0.3, shape)) / TEST_SAMPLES, 0.7 / TEST_SAMPLES


def documented() -> Iterator[tuple[str, int, int, float, float]]:
    """Distribution, n, comparisons, coverage and Student's alone in %, from the docstring's table."""
    text = inspect.getdoc(mean_limits) or ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    for kind, *cells in rows[2:]:
        for place, cell in enumerate(cells):
            both, alone = cell.rstrip(")").split(" (")
            yield kind, (3, 5, 10)[place % 3], (1, 5)[place // 3], float(both), float(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "comparisons", "promised", "student"), list(documented()))
def test_coverage_is_as_documented(kind: str, n: int, comparisons: int, promised: float, student: float) -> None:
    samples, mean = draws(kind, np.random.default_rng([n, comparisons]), n)
    resolution = 1 / TEST_SAMPLES if kind.endswith("resolution") else None
    low, high = mean_limits(samples, comparisons=comparisons, resolution=resolution, resamples=499)
    covered = 100 * np.mean((low <= mean + 1e-12) & (mean - 1e-12 <= high))
    level = 1 - 0.05 / comparisons
    alone = stats.t.interval(level, n - 1, samples.mean(axis=1), stats.sem(samples, axis=1) + 1e-300)
    covered_alone = 100 * np.mean((alone[0] <= mean + 1e-12) & (mean - 1e-12 <= alone[1]))
    assert covered == pytest.approx(promised, abs=1.5)
    assert covered_alone == pytest.approx(student, abs=1.5)
    assert covered >= covered_alone
    if kind.startswith(("normal", "heavy")):
        assert covered >= 100 * level - 0.7  # the promise itself


@pytest.mark.slow
@pytest.mark.parametrize("calls", [[[3, 6, 12, 16]], [[3], [6], [12], [16]], [[5], [8], [12], [16]], [[3, 5], [16]]])
def test_looking_several_times_confirms_what_loses_too_much_in_few_of_100_cases(calls: list[list[int]]) -> None:
    """A setting that loses just what is allowed, looked at in one call, or with more seeds in each."""
    losses, wrong = np.random.default_rng(0).normal(0.5, 0.65, size=(2000, 16)), np.zeros(2000, dtype=bool)
    for n in chain(*calls):
        share, spent = shares_of_error(n, calls)
        wrong |= mean_limits(losses[:, :n], confidence=1 - 0.05 * share, resamples=200)[1] <= 0.5
    assert 0.005 < wrong.mean() < 0.05 * spent / 2


def test_a_setting_has_the_share_of_the_look_that_its_seeds_were_trained_for() -> None:
    calls = [[3, 6], [12], [16]]
    shares = [shares_of_error(n, calls)[0] for n in (2, 4, 6, 7, 13, 20)]  # seeds may be missing
    assert shares == [1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 8, 1 / 8]
    assert shares_of_error(4, []) == (1, 1)
    many = [[n] for n in range(3, 40)]
    assert sum(shares_of_error(n, many)[0] for n in range(3, 40)) == pytest.approx(shares_of_error(39, many)[1])


@pytest.mark.slow
@pytest.mark.thorough
def test_five_intervals_together_cover_their_means() -> None:
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(1, SAMPLES, 5))  # what the baseline does by chance is in every difference
    low, high = mean_limits(rng.normal(size=(5, SAMPLES, 5)) + shared, comparisons=5, resamples=499)
    assert ((low <= 0) & (high >= 0)).all(axis=0).mean() >= 0.95
    low, high = mean_limits(rng.normal(size=(5, SAMPLES, 5)) + shared, resamples=499)
    assert ((low <= 0) & (high >= 0)).all(axis=0).mean() < 0.93  # without the correction they do not


def test_symmetric_samples_have_students_interval() -> None:
    sample = [-0.01, -0.005, 0.0, 0.005, 0.01]  # no skewness, and too few values for the bootstrap to reach farther
    for comparisons in (1, 5):
        found = paired_interval(sample, confidence=0.9, comparisons=comparisons)
        expected = stats.ttest_1samp(sample, 0).confidence_interval(1 - 0.1 / comparisons)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.n, found.confidence) == (5, 0.9)
    assert found.mean == pytest.approx(0, abs=1e-12)


def test_the_bootstrap_decides_where_it_reaches_farther_than_students_interval() -> None:
    sample = np.repeat([0.0, 1.0], 10)
    student = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
    # Hesterberg's level, on the exact distribution of how many ones a resample of these twenty holds.
    tail = stats.norm.cdf(-math.sqrt(20 / 19) * stats.t.ppf(0.975, 19))
    exact = [stats.binom(20, 0.5).ppf(level) / 20 for level in (tail, 1 - tail)]
    found = paired_interval(sample)
    assert (found.low, found.high) == pytest.approx(tuple(exact))
    assert found.high > student.high


def test_equal_differences_have_no_width_but_that_of_the_resolution() -> None:
    found = paired_interval([0.003] * 5)
    assert (found.low, found.high) == pytest.approx((0.003, 0.003), abs=1e-12)
    found = paired_interval([0.003] * 5, resolution=1 / 599)
    assert (found.low, found.high) == pytest.approx((0.003 - 1 / 599, 0.003 + 1 / 599))
    wide = [-0.01, 0.0, 0.01]
    assert paired_interval(wide, resolution=1 / 599) == paired_interval(wide)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"differences": [0.1]}, "an interval needs at least two seeds, got 1: train on more seeds"),
        ({"differences": []}, "an interval needs at least two seeds, got 0: train on more seeds"),
        ({"differences": [0.1, math.nan]}, "an interval needs finite numbers: leave out seeds without a result"),
        ({"differences": [[0.1, 0.2]]}, "the differences must be one number a seed, got an array of shape (1, 2)"),
        ({"confidence": 95}, "the confidence must be a fraction between 0 and 1, such as 0.95, got 95"),
        ({"confidence": math.nan}, "the confidence must be a fraction between 0 and 1, such as 0.95, got nan"),
        ({"comparisons": 0}, "the number of comparisons must be >= 1, got 0"),
        ({"resolution": 0.0}, "the resolution must be > 0, such as 1 / number of test samples, got 0.0"),
        ({"resolution": math.inf}, "the resolution must be > 0, such as 1 / number of test samples, got inf"),
    ],
)
def test_what_is_no_sample_or_level_is_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as raised:
        paired_interval(**({"differences": [0.1, 0.2]} | arguments))  # type: ignore[arg-type]
    assert str(raised.value) == message


def run(role: str, seed: int, accuracy: float, saved: float = 0.0, *, of: int | None = None, status: str = "completed"):
    """One row of a confirmation study."""
    done = status == "completed"
    return {
        "role": role, "candidate": of, "seed": seed, "status": status,
        "test_accuracy": accuracy if done else math.nan, "compute_saved": saved if done else math.nan,
        "accuracy": 0.5,
    }  # fmt: skip


def confirmation(*rows: dict[str, object]) -> pd.DataFrame:
    """The frame of a confirmation study."""
    frame = pd.DataFrame(rows, columns=list(run("", 0, 0)))
    return frame.assign(trial=range(len(frame))).astype({"candidate": "Int64"})


BASELINES = [run("baseline", seed, accuracy) for seed, accuracy in enumerate([0.96, 0.97, 0.95, 0.98])]


def test_a_candidate_is_confirmed_when_the_upper_end_is_within_the_drop() -> None:
    drops = [0.001, 0.002, 0.000, 0.001]
    rows = [
        run("candidate", seed, BASELINES[seed]["test_accuracy"] - drop, 0.3 + seed / 100, of=17)
        for seed, drop in enumerate(drops)
    ]
    table = confirm_table(confirmation(*BASELINES, *rows), allowed_drop=0.005)
    assert list(table.columns) == confirm_columns(ACCURACY)
    row = table.iloc[0]
    drop = paired_interval(drops)
    saved = paired_interval([0.3, 0.31, 0.32, 0.33])
    assert (row["candidate"], row["seeds"], row["confidence"], len(table)) == (17, 4, 0.95, 1)
    assert tuple(row[["accuracy_drop", "drop_low", "drop_high"]]) == pytest.approx((drop.mean, drop.low, drop.high))
    assert row["drop_worst"] == pytest.approx(max(drops))
    assert tuple(row[["compute_saved", "compute_saved_low", "compute_saved_high"]]) == pytest.approx(
        (saved.mean, saved.low, saved.high)
    )
    assert row["confirmed"]
    just_below = drop.high - 1e-6
    assert not confirm_table(confirmation(*BASELINES, *rows), allowed_drop=just_below)["confirmed"].any()
    # The allowed drop itself is within, however the subtraction rounds.
    assert confirm_table(confirmation(*BASELINES, *rows), allowed_drop=drop.high)["confirmed"].all()
    coarse = confirm_table(confirmation(*BASELINES, *rows), allowed_drop=0.005, resolution=0.01).iloc[0]
    assert coarse["drop_high"] == pytest.approx(0.001 + 0.01)
    assert not coarse["confirmed"]
    assert coarse["compute_saved_high"] == row["compute_saved_high"]


def test_pairs_are_seeds_on_which_both_completed() -> None:
    rows = [
        *BASELINES[:3],
        run("baseline", 3, 0, status="failed"),
        run("candidate", 0, 0.95, 0.2, of=5),
        run("candidate", 1, 0, of=5, status="failed"),
        run("candidate", 1, 0, of=5, status="interrupted"),
        run("candidate", 1, 0.95, 0.2, of=5),
        run("candidate", 1, 0.97, 0.4, of=5),  # trained twice: the mean counts, once
        run("candidate", 2, 0, of=5, status="running"),
        run("candidate", 3, 0.99, 0.9, of=5),  # its baseline failed
        run("candidate", 9, 0.99, 0.9, of=5),  # there is no baseline
        run("candidate", 0, 0.96, 0.6, of=2),
        run("candidate", 0, 0, of=8, status="failed"),
        run("search", 0, 0.5, 0.9),
    ]
    table = confirm_table(confirmation(*rows), allowed_drop=0.005).set_index("candidate")
    assert table["seeds"].to_dict() == {2: 1, 5: 2, 8: 0}
    drop = paired_interval([0.01, 0.01], comparisons=3)
    assert table.loc[5, "accuracy_drop"] == pytest.approx(drop.mean)
    assert table.loc[5, "drop_high"] == pytest.approx(drop.high)
    saved = paired_interval([0.2, 0.3], comparisons=3)  # corrected for candidates without a result, too
    assert table.loc[5, "compute_saved_high"] == pytest.approx(saved.high)
    assert table.loc[2, ["compute_saved", "accuracy_drop"]].tolist() == pytest.approx([0.6, 0.0])
    assert table.loc[[2, 8], ["compute_saved_low", "compute_saved_high", "drop_low", "drop_high"]].isna().all(axis=None)
    assert table.loc[8, ["compute_saved", "accuracy_drop"]].isna().all()
    assert not table["confirmed"].any()


def test_confirmed_candidates_come_first_then_by_compute_saved() -> None:
    def candidate(number: int, saved: float, drop: float) -> list[dict[str, object]]:
        return [
            run("candidate", seed, baseline["test_accuracy"] - drop, saved, of=number)
            for seed, baseline in enumerate(BASELINES)
        ]

    rows = [*candidate(1, 0.2, 0), *candidate(4, 0.9, 0.1), *candidate(3, 0.3, 0), *candidate(2, 0.3, 0)]
    table = confirm_table(confirmation(*BASELINES, *rows), allowed_drop=0.005, resolution=1e-4)
    assert table["candidate"].tolist() == [2, 3, 1, 4]
    assert table["confirmed"].tolist() == [True, True, True, False]


def runs_of(number: int, drops: list[float], saved: float = 0.3) -> list[dict[str, object]]:
    return [
        run("candidate", seed, float(str(BASELINES[seed]["test_accuracy"])) - drop, saved, of=number)
        for seed, drop in enumerate(drops)
    ]


@pytest.mark.parametrize(
    ("drops", "how", "confirmed", "refuted"),
    [
        ([0.001, 0.0, 0.001, 0.0], {}, True, False),
        ([0.001, 0.0], {}, False, False),  # two pairs are too few
        ([0.001, 0.0, 0.001, 0.0], {"saved": 0.0}, False, False),  # nothing is saved there
        ([0.0, 0.02, 0.001, 0.0], {}, False, False),  # too wide to say
        ([0.03, 0.031, 0.029, 0.03], {}, False, True),  # even the lower end is beyond the allowed drop
        ([0.001, 0.0, 0.001], {"fails": True}, False, False),  # it may lose too much where it failed
        ([0.001], {"fails": True}, False, True),
        ([], {"fails": True}, False, True),
        ([0.001, 0.0, 0.001, 0.0], {"fails": True}, True, False),  # it was trained again
        # Equal drops say nothing of how they vary, unless it is known how finely they are told apart.
        ([0.0] * 4, {"resolution": None}, False, False),
        ([0.0] * 4, {}, True, False),
    ],
)
def test_what_is_confirmed_and_what_is_refuted(
    drops: list[float], how: dict[str, object], confirmed: bool, refuted: bool
) -> None:
    given = {"saved": 0.3, "fails": False, "resolution": 1e-4, **how}
    rows = runs_of(1, drops, saved=float(str(given["saved"])))
    rows += [run("candidate", 3, 0, of=1, status="failed")] if given["fails"] else []
    resolution = given["resolution"] and 1e-4
    (row,) = confirm_table(confirmation(*BASELINES, *rows), allowed_drop=0.005, resolution=resolution).to_dict(
        "records"
    )
    assert (row["confirmed"], row["refuted"]) == (confirmed, refuted)


def test_candidates_that_have_not_begun_count_in_the_correction() -> None:
    rows = (*BASELINES, *runs_of(1, [0.001, 0.0, 0.002, 0.0]))
    alone, of_five = (confirm_table(confirmation(*rows), allowed_drop=0.005, planned=n).iloc[0] for n in (0, 5))
    assert alone["drop_high"] == pytest.approx(paired_interval([0.001, 0.0, 0.002, 0.0]).high)
    assert of_five["drop_high"] == pytest.approx(paired_interval([0.001, 0.0, 0.002, 0.0], comparisons=5).high)


def test_an_ordinary_study_is_no_confirmation() -> None:
    with pytest.raises(UserError, match="the trials have no column 'candidate': give those of a confirmation study"):
        confirm_table(confirmation().drop(columns="candidate"), allowed_drop=0.005)
    with pytest.raises(UserError, match=r"the allowed accuracy loss must be a fraction in \[0, 1\)"):
        confirm_table(confirmation(), allowed_drop=2)
    with pytest.raises(UserError, match="the confidence must be a fraction between 0 and 1"):
        confirm_table(confirmation(), allowed_drop=0.005, confidence=95)
