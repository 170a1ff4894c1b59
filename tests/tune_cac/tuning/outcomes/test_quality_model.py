"""The model of the quality against normal densities of scipy and conditioning by an inverse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from analysis.metrics.pareto import hypervolume, non_dominated
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior


def covariance(a: np.ndarray, b: np.ndarray, length: float, amplitude: float) -> np.ndarray:
    """Of two lists of outcomes, pair by pair."""
    return np.array([
        [1 + 100 * x[0] * y[0] + amplitude**2 * np.exp(-np.mean((x - y) ** 2) / (2 * length**2)) for y in b] for x in a
    ])  # fmt: skip


def test_it_is_the_conditional_normal_of_the_likeliest_of_its_kernels() -> None:
    draw = np.random.default_rng(0)
    trained, candidates = draw.random((7, 3)), draw.random((5, 3))
    losses = 0.01 * trained[:, 0] + 0.001 * draw.normal(size=7)
    unit = 0.005
    found = posterior(trained, losses, candidates, unit=unit)

    def density(kernel: tuple[float, float, float]) -> float:
        length, amplitude, noise = kernel
        own = covariance(trained, trained, length, amplitude) + noise**2 * np.eye(7)
        return float(multivariate_normal(np.zeros(7), own).logpdf(losses / unit))

    length, amplitude, noise = max(product((0.15, 0.3, 0.6), (0.3, 1.0, 3.0), (0.1, 0.3, 0.6, 1.2)), key=density)
    inverse = np.linalg.inv(covariance(trained, trained, length, amplitude) + noise**2 * np.eye(7))
    across = covariance(candidates, trained, length, amplitude)
    mean = across @ inverse @ (losses / unit) * unit
    spread = (
        np.sqrt(np.diag(covariance(candidates, candidates, length, amplitude) - across @ inverse @ across.T)) * unit
    )
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.spread, spread, rtol=1e-4)
    assert found.noise == noise * unit
    np.testing.assert_allclose(found.share_within(0.005), norm.cdf(0.005, mean, spread), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("luck", [0.0, 0.8])
def test_earlier_studies_deviate_and_one_that_misleads_counts_for_less(luck: float) -> None:
    """Against conditioning by an inverse, with the deviations of the likeliest: all alike, then one by one.

    What a study's losses have in common is a random constant of its own.
    """
    draw = np.random.default_rng(2)
    trained, candidates = draw.random((30, 3)), draw.random((5, 3))
    studies = np.repeat([1, 2, 0], 10)
    truth = 3 * trained[:, 0] ** 2 + trained[:, 1]
    losses = np.where(studies == 2, 6 - 3 * truth, truth) + 0.1 * draw.normal(size=30)  # the second misleads
    found = posterior(trained, losses, candidates, unit=1.0, studies=studies, luck=luck)

    def own(length: float, amplitude: float, noise: float, others: dict[int, tuple[float, float]]) -> np.ndarray:
        full = covariance(trained, trained, length, amplitude)
        factors = np.ones((30, 30))
        shared, more = np.zeros((30, 30)), np.full(30, noise**2)
        for study, (deviation, further) in others.items():
            factors[np.ix_(studies == study, studies == study)] += deviation**2
            more[studies == study] += further**2
            shared[np.ix_(studies == study, studies == study)] = luck**2
        return full * factors + shared + np.diag(more)

    def density(kernel: tuple[float, float, float], others: dict[int, tuple[float, float]]) -> float:
        expected = sum(norm.logpdf(np.log(deviation / 0.3)) for deviation, _ in others.values())
        return float(multivariate_normal(np.zeros(30), own(*kernel, others)).logpdf(losses) + expected)

    deviations = (0.1, 0.3, 1.0, 3.0, 10.0)
    kernels = list(product((0.15, 0.3, 0.6), (0.3, 1.0, 3.0), (0.1, 0.3, 0.6, 1.2)))
    kernel, first = max(
        product(kernels, deviations), key=lambda one: density(one[0], dict.fromkeys((1, 2), (one[1], 0)))
    )
    others: dict[int, tuple[float, float]] = dict.fromkeys((1, 2), (first, 0.0))
    for study in (1, 2):
        choices = [{**others, study: one} for one in product(deviations, (0.0, 0.5, 1.5))]
        others = max(choices, key=lambda one: density(kernel, one))
    assert others[1][0] < others[2][0]
    inverse = np.linalg.inv(own(*kernel, others))
    across = covariance(candidates, trained, *kernel[:2])
    np.testing.assert_allclose(found.mean, across @ inverse @ losses, rtol=1e-6)
    variance = np.diag(covariance(candidates, candidates, *kernel[:2]) - across @ inverse @ across.T)
    np.testing.assert_allclose(found.spread, np.sqrt(variance), rtol=1e-4)
    # It is no worse than without the study that misleads.
    kept = studies != 2
    without = posterior(trained[kept], losses[kept], candidates, unit=1.0, studies=studies[kept])
    true = 3 * candidates[:, 0] ** 2 + candidates[:, 1]
    assert np.abs(found.mean - true).mean() < np.abs(without.mean - true).mean() + 0.1


@pytest.mark.parametrize("count", [4, 16])
def test_studies_are_as_sure_as_their_number_however_many_runs_they_have(count: int) -> None:
    """The constant has a normal prior of standard deviation 1, and count observations with the luck's variance."""
    trained = np.tile(np.linspace(0.0, 1.0, 15), count)[:, None]
    studies = np.repeat(np.arange(1, count + 1), 15)
    found = posterior(trained, np.zeros(len(trained)), np.array([[0.0]]), unit=1.0, studies=studies, luck=1.5)
    assert found.mean[0] == pytest.approx(0.0, abs=1e-9)
    assert found.spread[0] == pytest.approx((1 + count / 1.5**2) ** -0.5, rel=0.03)


def test_the_area_gained_is_the_mean_growth_of_the_hypervolume() -> None:
    draw = np.random.default_rng(1)
    found = Posterior(mean=np.array([0.0, 0.004, 0.02]), spread=np.array([0.001, 0.003, 0.004]), noise=0.002)
    saved, front, worst = np.array([0.3, 0.55, 0.6]), [(0.0, 0.0), (0.001, 0.2), (0.006, 0.5), (0.03, 0.9)], 0.01

    def area(points: list[tuple[float, float]]) -> float:
        values = np.array([(-max(loss, 0.0), share) for loss, share in points if loss <= worst])
        return hypervolume(values[non_dominated(values)], (-worst, 0.0))

    losses = found.mean + found.spread * draw.normal(size=(4000, 3))
    grown = [
        [area([*front, (loss, share)]) - area(front) for loss, share in zip(row, saved, strict=True)] for row in losses
    ]
    np.testing.assert_allclose(found.area_gained(saved, front, worst), np.mean(grown, axis=0), rtol=0.05, atol=1e-6)
    assert found.area_gained(np.array([0.1, 0.1, 0.1]), [(-0.5, 0.2)], worst).tolist() == [0.0, 0.0, 0.0]


def test_a_run_that_diverged_says_that_its_like_lose_too_much_and_nothing_of_others() -> None:
    trained = np.array([[0.0, 1.0], [0.2, 0.8], [0.4, 0.6], [0.9, 0.05]])
    losses = np.array([0.0, 0.001, 0.002, np.inf])
    found = posterior(trained, losses, np.array([[0.3, 0.7], [0.88, 0.06]]), unit=0.005)
    assert np.isfinite(found.mean).all()
    within = found.share_within(0.005)
    assert within[0] > 0.5 > 0.2 > within[1]
