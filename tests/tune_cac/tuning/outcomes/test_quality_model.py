"""The model of the quality against normal densities of scipy and conditioning by an inverse."""

from __future__ import annotations

from itertools import product

import numpy as np
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
