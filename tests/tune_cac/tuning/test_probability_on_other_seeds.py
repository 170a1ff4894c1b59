"""The model of the quality, against sums by hand, scipy and counts of samples."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm
from searchers import learning
from tiny_workload import HeadFirst, Tiny, tiny  # noqa: F401 - a fixture

from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.trace_replay.traces import load_trace, trains_after
from trainables.quality import ACCURACY, Quality
from tune_cac.tuning.probability_on_other_seeds import Depths, LossScale, Posterior, features_of, loss_scale, posterior

# --- features ---------------------------------------------------------------------------------------------------------


def test_shares_of_a_layer_are_the_mean_of_the_steps_over_its_depths() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        stops = [(float(when), float(through)) for when, through in draw.random((3, 2)).round(3)]
        depths = sorted(draw.random(4).round(3).tolist())
        middles = (np.arange(100_000) + 0.5) / 100_000
        steps = np.min([np.where(middles <= through, when, 0.9) for when, through in stops], axis=0).clip(max=0.9)
        edges = [0.0, *depths]
        _, _, *shares = features_of([s for s in stops if s[0] < 0.9], depths, end=0.9, saved=0.0)
        for place, found in enumerate(shares):
            inside = (middles > edges[place]) & (middles <= edges[place + 1])
            assert found == pytest.approx(steps[inside].mean(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("reverse", [False, True])
def test_depths_follow_the_order_in_which_layers_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """A model that registers its layers in another order than it runs them in, whose whole units stop."""
    monkeypatch.setattr(Tiny, "make_model", lambda self: HeadFirst(reverse=reverse))
    learning(tmp_path, space="stop_rules").learn()
    trace = load_trace(tmp_path)
    depths, names = Depths(trace), list(trace.layer_names)
    _, whole = trace.costs_of(trace.trains).before(trace.steps_per_epoch)
    for blueprint in trace.facts.values():
        units = blueprint.plan.units[: blueprint.stoppable]
        assert len(units) == 4
        for unit in units:
            left = trace.costs_of(trains_after(trace, blueprint, unit.end)).before(trace.steps_per_epoch)[1]
            own = [
                number for number, name in enumerate(names) if name.split(".")[1] == names[unit.number].split(".")[1]
            ]
            assert [depths.of(number) for number in own] == pytest.approx([1 - left / whole] * len(own))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_depth_is_the_share_of_the_backward_pass_that_a_stop_spares(tmp_path: Path) -> None:
    learning(tmp_path).learn()
    trace = load_trace(tmp_path)
    depths = Depths(trace)
    names = list(trace.layer_names)
    found = [depths.of(names.index(f"{block}.weight")) for block in (0, 3, 6)]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] < 1
    # Backward FLOPs of a convolution: of its weight and, but for the first, of its input, each as many as forward.
    pixels = {0: 36 * 9 * 4, 3: 36 * 9 * 16, 6: 36 * 9 * 24, 9: 36 * 9 * 36}
    flops = {block: 2 * macs * (1 if block == 0 else 2) for block, macs in pixels.items()}
    total = sum(flops.values()) + 2 * 2 * 6 * 3
    spared = np.cumsum(
        [flops[0], flops[3], flops[6]]
    )  # the norm before the next layer still wants its input's gradient
    assert found == pytest.approx((spared / total).tolist(), rel=1e-6)
    assert depths.of(-1) == 0.0
    assert depths.of(len(names) - 1) == max(*found, depths.of(names.index("9.weight")))


# --- the Gaussian process ---------------------------------------------------------------------------------------------

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


def seed_effects(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Covariance of two lists of losses by the seed: each has its effect on the baseline less that on its own run."""
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


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [0.0, 0.8])
def test_it_is_the_conditional_normal_of_the_likeliest_of_its_kernels(seeds: float) -> None:
    draw = np.random.default_rng(0)
    trained, candidates = outcomes(draw, 9, ended=(1.0, 0.6, 0.5)), outcomes(draw, 6, ended=(1.0, 0.6, 0.7))
    losses = 0.01 * trained[:, 0] + 0.001 * draw.normal(size=9)
    unit = 0.005
    found = posterior(trained, losses, candidates, unit=unit, noise=seeds * unit)
    common = seeds**2 * seed_effects(trained, trained)

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
    np.testing.assert_allclose(found.other_mean, mean, rtol=1e-6)
    here = seeds**2 * seed_effects(candidates, trained), seeds**2 * seed_effects(candidates, candidates)
    own_mean, own_spread = conditional(across + here[0], own + here[1])
    np.testing.assert_allclose(found.mean, own_mean, rtol=1e-6)
    np.testing.assert_allclose(found.deviation, own_spread, rtol=1e-4)
    np.testing.assert_allclose(found.share_within(0.005), norm.cdf(0.005, own_mean, own_spread), rtol=1e-3, atol=1e-9)
    elsewhere = np.sqrt(spread**2 + (noise * unit) ** 2 + unit**2 * np.diag(here[1]))
    np.testing.assert_allclose(found.other_deviation, elsewhere, rtol=1e-4)
    wanted = norm.cdf(0.005, mean, elsewhere)
    np.testing.assert_allclose(found.other_share_within(0.005), wanted, rtol=1e-3, atol=1e-9)


def test_runs_of_full_length_share_the_baselines_seed_effect_the_less_the_earlier_they_stop() -> None:
    """So of runs that lose as much on average those with early stops hold on fewer other seeds."""
    late, early, shorter = [0.2, 1.0, *[0.8] * 3], [0.7, 1.0, *[0.3] * 3], [0.4, 0.6, *[0.6] * 3]
    nothing = np.empty((0, 5)), np.empty(0), np.array([late, early, shorter])
    variances = [posterior(*nothing, unit=1.0, noise=noise).other_deviation ** 2 for noise in (0.0, 1.0)]
    by_seed = np.sqrt(variances[1] - variances[0])
    assert by_seed[0] < 0.4 < 0.9 < by_seed[1] < by_seed[2]
    assert by_seed[2] == pytest.approx(np.sqrt(2))


def test_a_lucky_length_is_not_taken_for_a_good_one() -> None:
    """All runs of one length lose nothing, however many: that is the length's luck and the baseline's as well."""
    shorter = np.array([[0.4 + 0.01 * n, 0.6, *[0.6 - 0.01 * n] * 3] for n in range(20)])
    losses = np.full(20, -1.0)
    found = posterior(shorter, losses, shorter[:1], unit=1.0, noise=1.0)
    assert found.mean[0] == pytest.approx(-1.0, abs=0.15)
    assert found.other_mean[0] > -0.3  # regression to the mean
    assert posterior(shorter, losses, shorter[:1], unit=1.0).other_mean[0] == pytest.approx(-1.0, abs=0.2)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_area_gained_is_the_mean_growth_of_the_hypervolume() -> None:
    draw = np.random.default_rng(1)
    own = {"mean": np.array([0.0, 0.004, 0.02]), "deviation": np.array([0.001, 0.003, 0.004])}
    found = Posterior(**own, other_mean=np.zeros(3), other_deviation=np.ones(3))
    saved, front, worst = np.array([0.3, 0.55, 0.6]), [(0.0, 0.0), (0.001, 0.2), (0.006, 0.5), (0.03, 0.9)], 0.01

    def area(points: list[tuple[float, float]]) -> float:
        values = np.array([(-max(loss, 0.0), share) for loss, share in points if loss <= worst])
        return hypervolume(values[non_dominated(values)], (-worst, 0.0))

    losses = found.mean + found.deviation * draw.normal(size=(2000, 3))
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
    within = found.share_within(0.005)
    assert within[0] > 0.5 > 0.2 > within[1]


# --- the scale of losses ----------------------------------------------------------------------------------------------

SAMPLES = 599


BASELINE = 583 / SAMPLES


#: Features of six runs that lose much, and the samples that each loses.
TRAINED = np.array(
    [[0.5, 1, 0.1, 0.1, 0.1], [0.4, 1, 0.2, 0.2, 0.2], [0.3, 1, 0.3, 0.3, 0.3], [0.2, 1, 0.5, 0.5, 0.5],
     [0.25, 1, 0.45, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5, 0.5]]
)  # fmt: skip


LOST = np.array([60, 60, 55, 50, 52, 40])


def scale_of(allowed_drop: float | str) -> LossScale:
    return loss_scale(BASELINE, [BASELINE - lost / SAMPLES for lost in LOST], ACCURACY, allowed_drop)


def modelled(losses: np.ndarray, scale: LossScale) -> Posterior:
    return posterior(TRAINED, losses, TRAINED, unit=scale.unit, noise=scale.seed_noise)


def test_the_seed_noise_of_an_accuracy_is_that_of_so_many_samples() -> None:
    scale = scale_of(0.005)
    wrong = 1 - BASELINE
    assert scale.seed_noise == pytest.approx(math.sqrt(min(wrong / 2, wrong * (1 - wrong)) / SAMPLES))
    assert scale.allowed == scale.unit == 0.005  # more than half of the noise
    assert round(SAMPLES * scale.limit, 9) == 2.5  # two samples may be lost, three may not


@pytest.mark.parametrize("allowed_drop", [0.0, 0.0001, 0.001, 0.005])
def test_what_loses_forty_samples_holds_nowhere_whatever_is_allowed(allowed_drop: float) -> None:
    scale = scale_of(allowed_drop)
    found = modelled(LOST / SAMPLES, scale)
    assert found.share_within(scale.limit).max() < 0.01
    assert found.other_share_within(scale.other_limit).max() < 0.1


@pytest.mark.parametrize("baseline", [1.0, 1e-3, 1e-6, 1e-8, -1e-6])
def test_a_relative_loss_does_not_depend_on_the_scale_of_the_metric(baseline: float) -> None:
    quality = Quality(name="mse", direction="min", unit="")
    lost = np.array([0.3, 0.25, 0.2, 0.1, 0.002, 0.0])
    shares = []
    for value in (1.0, baseline):
        scale = loss_scale(value, [value + abs(value) * one for one in lost], quality, "1%")
        assert scale.unit == scale.allowed == scale.limit == pytest.approx(0.01 * abs(value))
        shares.append(modelled(lost * abs(value), scale).other_share_within(scale.allowed))
    np.testing.assert_allclose(shares[1], shares[0])


def test_of_another_metric_a_thousandth_is_the_least_unit() -> None:
    quality = Quality(name="loss", direction="min", unit="")
    scale = loss_scale(2.0, [2.5], quality, 0.0)
    assert (scale.allowed, scale.limit, scale.unit, scale.seed_noise) == (0.0, 0.0, 0.002, 0.002)
    assert loss_scale(0.0, [0.5], quality, "1%").unit > 0
