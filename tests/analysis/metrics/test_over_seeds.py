"""What losses on further seeds say of a setting, against Student's interval, hand-made tables and planted noise."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import analysis
from analysis.metrics.noise import seed_noise
from analysis.metrics.over_seeds import BEYOND, OPEN, WITHIN, losses_of, over_seeds
from analysis.metrics.ranking import ahead_of_shorter, control_line, relative_to_baseline
from analysis.presentation.summary_text import headline


def test_of_one_setting_without_an_expected_deviation_it_is_students_interval() -> None:
    losses = [0.004, -0.001, 0.002, 0.0]
    found = over_seeds({3: losses}, 0.0)[3]
    interval = stats.ttest_1samp(losses, 0).confidence_interval(0.95)
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert (found.n, found.mean, found.worst) == (4, pytest.approx(0.00125), 0.004)
    bound = stats.ttest_1samp(losses, 0, alternative="less").confidence_interval(0.9).high
    assert found.at_most(0.9) == pytest.approx(bound)


def test_the_noise_is_of_all_settings_and_of_what_is_expected() -> None:
    """Two settings of two seeds each have one degree of freedom each, the expected deviation two."""
    found = over_seeds({1: [0.0, 0.02], 2: [0.0, 0.04]}, 0.01)
    deviation = math.sqrt((2 * 0.01**2 + 2 * 0.01**2 + 2 * 0.02**2) / 4)
    assert found[2].at_most(0.975) == pytest.approx(0.02 + stats.t.ppf(0.975, 4) * deviation / math.sqrt(2))
    alone = over_seeds({1: [0.005]}, 0.01)[1]
    assert alone.interval[1] == pytest.approx(0.005 + stats.t.ppf(0.975, 2) * 0.01)


@pytest.mark.parametrize(
    ("losses", "seeds", "decision"),
    [
        ([-0.05, -0.05], 3, OPEN),  # the answer has all seeds
        ([0.0, 0.0, 0.0], 3, WITHIN),
        ([0.004, 0.0, 0.011], 3, WITHIN),  # exactly 0.005
        ([0.004, 0.0, 0.0112], 3, BEYOND),
        ([0.016], 3, BEYOND),  # the others could be far better, and rarely are
        ([0.016], 30, OPEN),
        ([0.0, math.inf], 3, BEYOND),  # a run failed
    ],
)
def test_an_answer_has_all_seeds_and_what_can_hardly_become_one_ends(
    losses: list[float], seeds: int, decision: str
) -> None:
    assert over_seeds({1: losses}, 0.0065)[1].decides(0.005, seeds) == decision


def test_what_is_left_early_would_not_have_become_the_answer() -> None:
    """Means that are drawn around the limit: 10 of 100 at most of those refused on one seed of three were mistakes."""
    rng, wrong = np.random.default_rng(0), []
    for _ in range(4000):
        losses = (rng.normal(0.005, 0.005) + 0.0065 * rng.normal(size=3)).tolist()
        found = over_seeds({1: losses[:1]}, 0.0065)[1].decides(0.005, 3)
        wrong += [over_seeds({1: losses}, 0.0065)[1].decides(0.005, 3) == WITHIN] * (found == BEYOND)
    assert len(wrong) > 400
    assert 0 < np.mean(wrong) < 0.1


def test_of_a_metric_whose_noise_is_not_known_one_seed_decides_by_its_mean() -> None:
    assert over_seeds({1: [0.1]}, 0.0)[1].decides(0.2, 1) == WITHIN
    assert over_seeds({1: [0.3]}, 0.0)[1].decides(0.2, 1) == BEYOND


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_the_interval_has_the_mean_in_95_of_100_cases_or_more(noise: float) -> None:
    """Differences that vary as expected, or half as much; two settings share the baseline of each seed."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(2000):
        baseline, runs = rng.normal(size=3), rng.normal(size=(2, 3))
        losses = 0.3 + noise * (runs - baseline) / math.sqrt(2)
        low, high = over_seeds({1: losses[0].tolist(), 2: losses[1].tolist()}, 1.0)[1].interval
        covered.append(low <= 0.3 <= high)
    assert np.mean(covered) >= 0.94


def trials_of(*rows: tuple[int, str, str | None, int | None, int, float, float]) -> pd.DataFrame:
    """Trials: number, role, control, candidate, seed, accuracy on both splits."""
    names = ["trial", "role", "control", "candidate", "seed", "accuracy", "test_accuracy"]
    frame = pd.DataFrame(rows, columns=names).astype({"candidate": "Int64"})
    failed = frame["accuracy"].isna()
    return frame.assign(
        status=np.where(failed, "failed", "completed"),
        compute_saved=np.select([frame["trial"] == 1, frame["candidate"].fillna(0) == 1], [0.5, 0.42], 0.0),
        epochs=10, study="s", workload="digits", method="gradskip",
    )  # fmt: skip


AGAIN, SHORTER = "other seed", "shorter on other seed"
STUDY = trials_of(
    (0, "baseline", None, None, 0, 0.90, 0.80), (1, "search", None, None, 0, 0.90, 0.80),
    (2, "control", AGAIN, 0, 1001, 0.92, 0.84), (3, "control", AGAIN, 1, 1001, 0.90, 0.82),
    (4, "control", AGAIN, 0, 1002, 0.94, 0.80), (5, "control", AGAIN, 1, 1002, 0.93, 0.79),
    (6, "control", SHORTER, 1, 1001, 0.89, 0.81), (7, "control", SHORTER, 1, 1002, 0.92, 0.78),
    (8, "control", "shorter", None, 0, 0.85, 0.80),
)  # fmt: skip


def test_a_loss_is_the_mean_of_both_splits_against_the_baseline_of_the_same_seed() -> None:
    losses, expected = losses_of(STUDY)
    assert losses == {
        1: {1001: pytest.approx(0.02), 1002: pytest.approx(0.01)},
        -2: {1001: pytest.approx(0.03), 1002: pytest.approx(0.02)},
    }
    assert expected == pytest.approx(float(seed_noise(0.85, 1 / 50)) / math.sqrt(2), rel=0.3)  # fiftieths
    ranking = analysis.rank(STUDY, allowed_drop=0.02)
    best = ranking.set_index("trial").loc[1]
    assert (best["seeds"], best["drop_mean"], best["drop_worst"]) == (2, pytest.approx(0.015), pytest.approx(0.02))
    assert best["within_over_seeds"] is np.True_
    assert (best["saved"], best["saved_mean"]) == (0.5, 0.42)  # rules stop otherwise on other seeds
    assert best["drop_splits"] == pytest.approx(0.0)
    apart = STUDY.assign(test_accuracy=STUDY["test_accuracy"].where(STUDY["trial"] != 3, 0.80))
    assert analysis.rank(apart, allowed_drop=0.02).set_index("trial")["drop_splits"][1] == pytest.approx(0.01)
    line = control_line(STUDY)
    found = ahead_of_shorter(ranking.iloc[0], line)
    assert found is not None
    assert (found[0], found[1].mean, found[2].mean) == (10, pytest.approx(0.025), pytest.approx(0.01))


def test_a_cut_run_on_further_seeds_is_compared_with_whatever_frame_is_given() -> None:
    """Behind on each seed by 20 points; on the own one no dense run was cut that short."""
    dense = STUDY["control"] == SHORTER
    trials = STUDY.assign(accuracy=STUDY["accuracy"] + 0.2 * dense, test_accuracy=STUDY["test_accuracy"] + 0.2 * dense)
    ranking, line = analysis.rank(trials, allowed_drop=0.02), control_line(trials)
    assert analysis.beats_shorter(ranking, line).tolist() == ["behind", pd.NA]
    assert analysis.beats_shorter(pd.concat([ranking, ranking]), line).tolist() == ["behind", pd.NA] * 2
    assert analysis.beats_shorter(ranking.drop(columns="trial"), line).isna().all()


def test_what_saves_nothing_on_average_is_no_answer() -> None:
    nothing = STUDY.assign(compute_saved=STUDY["compute_saved"].where(STUDY["candidate"].isna(), 0.0))
    other = STUDY[1:2].assign(trial=9, accuracy=0.89, compute_saved=0.4)
    ranking = analysis.rank(pd.concat([nothing, other]), allowed_drop=0.02)
    best = analysis.best(ranking)
    assert best is not None
    assert best["trial"] == 9
    said = headline(ranking, best, 0.02)
    assert said.endswith("1 setting that saved more saved nothing over further seeds.")
    assert "Nearest" not in headline(ranking, None, 0.001)


def test_runs_on_a_further_seed_are_compared_with_the_baseline_there() -> None:
    flops = [100.0, 50.0, 200.0, 50.0, 100.0, 50.0, 80.0, 40.0, 50.0]
    epochs = STUDY["epochs"].where(STUDY["control"] != SHORTER, 5)
    trials = relative_to_baseline(
        STUDY.assign(executed_flops=flops, dense_flops=[*flops[:1], 100.0, *flops[2:]], epochs=epochs)
    )
    assert trials["compute_saved"][6:8].tolist() == [0.6, 0.6]
    assert trials["accuracy_drop"][6:8].tolist() == pytest.approx([0.03, 0.02])


def test_equal_losses_tell_nothing_of_the_noise() -> None:
    found = over_seeds({1: [0.1 + 0.2, 0.3]}, 0.0)[1]
    assert (found.df, math.isnan(found.interval[0]), found.decides(0.4, 3)) == (0, True, OPEN)


def test_a_failed_run_loses_everything_and_one_without_its_baseline_says_nothing() -> None:
    rows = [*STUDY.itertuples(index=False)]
    failed = STUDY.copy()
    failed.loc[3, ["accuracy", "test_accuracy", "status"]] = [math.nan, math.nan, "failed"]
    assert losses_of(failed)[0][1] == {1001: math.inf, 1002: pytest.approx(0.01)}
    assert 1001 not in losses_of(STUDY.drop(index=2))[0][1]
    assert len(rows) == len(STUDY)


def test_where_seeds_change_nothing_nothing_is_said_of_them() -> None:
    same = STUDY.copy()
    same.loc[[2, 4], ["accuracy", "test_accuracy"]] = [0.90, 0.80]
    assert losses_of(same)[0][1] == {1001: pytest.approx(-0.01), 1002: pytest.approx(-0.01)}  # of few samples
    same.loc[[3, 5], ["accuracy", "test_accuracy"]] = [0.90, 0.80]
    assert losses_of(same)[0] == losses_of(same.drop(index=[4, 5, 7]))[0] == {}
    assert "seeds" not in analysis.rank(same)
    trained = same.assign(train_loss=[0.1 + number / 1000 for number in range(len(same))])
    assert losses_of(trained)[0][1] == {1001: 0.0, 1002: 0.0}  # as many were right by chance
    assert losses_of(same.assign(train_loss=math.nan))[0] == losses_of(same.assign(train_loss=0.1))[0] == {}
