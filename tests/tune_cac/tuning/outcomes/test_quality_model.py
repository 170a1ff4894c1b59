"""The model of the quality against normal densities of scipy and conditioning by an inverse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from analysis.metrics.pareto import hypervolume, non_dominated
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior

KERNELS = list(product((0.2, 0.5), (0.3, 1.0, 3.0), product((1.0, 4.0, 16.0), (0.25, 1.0, 4.0)), (0.1, 0.3, 0.8)))


def outcomes(draw: np.random.Generator, count: int, *, ended: tuple[float, ...] = (1.0,)) -> np.ndarray:
    """Features of runs of three layers."""
    ends = draw.choice(ended, size=count)
    shares = ends[:, None] * draw.random((count, 3))
    return np.column_stack([1 - shares.mean(axis=1), ends, shares])


def slopes_of(row: np.ndarray) -> np.ndarray:
    """Two numbers that the mean grows with, layer by layer."""
    ended = row[1]
    missed = sum(1 - share / ended for share in row[2:]) / (len(row) - 2)
    return np.array([missed**3 / ended, 1 / ended - 1])


def covariance(
    a: np.ndarray, b: np.ndarray, length: float, amplitude: float, slopes: tuple[float, float]
) -> np.ndarray:
    """Of two lists of outcomes, pair by pair, given that a full run without stops is known to lose nothing."""

    def prior(x: np.ndarray, y: np.ndarray) -> float:
        common = sum(slopes_of(x) * slopes_of(y) * np.array(slopes) ** 2)
        return float(common + amplitude**2 * np.exp(-np.mean((x - y) ** 2) / (2 * length**2)))

    dense = np.array([0.0, *np.ones(a.shape[1] - 1)])
    return np.array([[prior(x, y) - prior(x, dense) * prior(dense, y) / prior(dense, dense) for y in b] for x in a])


def means(rows: np.ndarray, slopes: tuple[float, float]) -> np.ndarray:
    return np.array([slopes_of(row) @ slopes for row in rows])


def luck_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Covariance of two lists of losses by the luck of runs: each is that of the baseline less its own."""
    dense = np.array([0.0, *np.ones(a.shape[1] - 1)])

    def alike(x: np.ndarray, y: np.ndarray) -> float:
        apart = [(share / x[1] - other / y[1]) ** 2 for share, other in zip(x[2:], y[2:], strict=True)]
        return float(np.exp(-1.5 * sum(apart) / len(apart))) if x[1] == y[1] else 0.0

    def shared(x: np.ndarray, y: np.ndarray) -> float:
        return alike(dense, dense) - alike(dense, y) - alike(x, dense) + alike(x, y)

    return np.array([[shared(x, y) for y in b] for x in a])


def usual(slopes: tuple[float, float]) -> float:
    """Logarithm of the slopes' prior density, but for a constant."""
    return float(norm.logpdf(np.log(slopes[0] / 4.0)) + norm.logpdf(np.log(slopes[1])))


@pytest.mark.parametrize("luck", [0.0, 0.8])
def test_it_is_the_conditional_normal_of_the_likeliest_of_its_kernels(luck: float) -> None:
    draw = np.random.default_rng(0)
    trained, candidates = outcomes(draw, 9, ended=(1.0, 0.6, 0.5)), outcomes(draw, 6, ended=(1.0, 0.6, 0.7))
    losses = 0.01 * trained[:, 0] + 0.001 * draw.normal(size=9)
    unit = 0.005
    found = posterior(trained, losses, candidates, unit=unit, luck=luck)
    common = luck**2 * luck_of(trained, trained)

    def density(kernel: tuple[float, float, tuple[float, float], float]) -> float:
        own = covariance(trained, trained, *kernel[:3]) + common + kernel[3] ** 2 * np.eye(9)
        return float(multivariate_normal(means(trained, kernel[2]), own).logpdf(losses / unit)) + usual(kernel[2])

    *kernel, noise = max(KERNELS, key=density)
    slopes = kernel[2]
    inverse = np.linalg.inv(covariance(trained, trained, *kernel) + common + noise**2 * np.eye(9))
    across, own = (covariance(candidates, of, *kernel) for of in (trained, candidates))

    def conditional(across: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = means(candidates, slopes) + across @ inverse @ (losses / unit - means(trained, slopes))
        return mean * unit, np.sqrt(np.diag(own - across @ inverse @ across.T)) * unit

    mean, spread = conditional(across, own)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.spread, spread, rtol=1e-4)
    here = luck**2 * luck_of(candidates, trained), luck**2 * luck_of(candidates, candidates)
    own_mean, own_spread = conditional(across + here[0], own + here[1])
    np.testing.assert_allclose(found.own_mean, own_mean, rtol=1e-6)
    np.testing.assert_allclose(found.own_spread, own_spread, rtol=1e-4)
    assert found.noise == noise * unit
    np.testing.assert_allclose(
        found.own_share_within(0.005), norm.cdf(0.005, own_mean, own_spread), rtol=1e-3, atol=1e-9
    )
    wanted = norm.cdf(0.005, mean, np.sqrt(spread**2 + found.noise**2 + unit**2 * np.diag(here[1])))
    np.testing.assert_allclose(found.other_share_within(0.005), wanted, rtol=1e-3, atol=1e-9)


def test_runs_of_full_length_share_the_luck_of_the_baseline_the_less_the_earlier_they_stop() -> None:
    """So of runs that lose as much on average those with early stops hold on fewer other seeds."""
    late, early = [0.2, 1.0, *[0.8] * 3], [0.7, 1.0, *[0.3] * 3]
    shorter = [0.4, 0.6, *[0.6] * 3]
    found = posterior(np.empty((0, 5)), np.empty(0), np.array([late, early, shorter]), unit=1.0, luck=1.0)
    assert found.luck[0] < 0.4 < 0.9 < found.luck[1] < found.luck[2]
    assert found.luck[2] == pytest.approx(np.sqrt(2))
    none = posterior(np.empty((0, 5)), np.empty(0), np.array([late]), unit=1.0)
    assert none.luck.tolist() == [0.0]


def test_a_lucky_length_is_not_taken_for_a_good_one() -> None:
    """All runs of one length lose nothing, however many: that is the length's luck and the baseline's as well."""
    shorter = np.array([[0.4 + 0.01 * n, 0.6, *[0.6 - 0.01 * n] * 3] for n in range(20)])
    losses = np.full(20, -1.0)
    found = posterior(shorter, losses, shorter[:1], unit=1.0, luck=1.0)
    assert found.own_mean[0] == pytest.approx(-1.0, abs=0.15)
    assert found.mean[0] > -0.3  # regression to the mean
    assert posterior(shorter, losses, shorter[:1], unit=1.0).mean[0] == pytest.approx(-1.0, abs=0.2)


def test_the_area_gained_is_the_mean_growth_of_the_hypervolume() -> None:
    draw = np.random.default_rng(1)
    own = {"own_mean": np.array([0.0, 0.004, 0.02]), "own_spread": np.array([0.001, 0.003, 0.004])}
    found = Posterior(mean=np.zeros(3), spread=np.ones(3), luck=np.ones(3), **own, noise=0.002)
    saved, front, worst = np.array([0.3, 0.55, 0.6]), [(0.0, 0.0), (0.001, 0.2), (0.006, 0.5), (0.03, 0.9)], 0.01

    def area(points: list[tuple[float, float]]) -> float:
        values = np.array([(-max(loss, 0.0), share) for loss, share in points if loss <= worst])
        return hypervolume(values[non_dominated(values)], (-worst, 0.0))

    losses = found.own_mean + found.own_spread * draw.normal(size=(4000, 3))
    grown = [
        [area([*front, (loss, share)]) - area(front) for loss, share in zip(row, saved, strict=True)] for row in losses
    ]
    np.testing.assert_allclose(found.area_gained(saved, front, worst), np.mean(grown, axis=0), rtol=0.05, atol=1e-6)
    assert found.area_gained(np.array([0.1, 0.1, 0.1]), [(-0.5, 0.2)], worst).tolist() == [0.0, 0.0, 0.0]


def test_a_run_that_diverged_says_that_its_like_lose_too_much_and_nothing_of_others() -> None:
    trained = np.array([[0.2, 1.0, 0.8], [0.4, 1.0, 0.6], [0.9, 1.0, 0.05]])
    losses = np.array([0.001, 0.002, np.inf])
    found = posterior(trained, losses, np.array([[0.3, 1.0, 0.7], [0.88, 1.0, 0.06]]), unit=0.005)
    assert np.isfinite(found.mean).all()
    within = found.own_share_within(0.005)
    assert within[0] > 0.5 > 0.2 > within[1]
