"""The scale of losses: what may be lost, the luck of a seed, and the unit that the model of the quality counts in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainables.quality import ACCURACY, Quality
from tune_cac.tuning.outcomes.distinct_outcomes import LossScale, loss_scale
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior

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
    return posterior(TRAINED, losses, TRAINED, unit=scale.unit, luck=scale.luck / scale.unit)


def test_the_luck_of_an_accuracy_is_that_of_so_many_samples() -> None:
    scale = scale_of(0.005)
    wrong = 1 - BASELINE
    assert scale.luck == pytest.approx(math.sqrt(min(wrong / 2, wrong * (1 - wrong)) / SAMPLES))
    assert scale.allowed == scale.unit == 0.005  # more than half of the luck
    assert round(SAMPLES * scale.limit, 9) == 2.5  # two samples may be lost, three may not


@pytest.mark.parametrize("allowed_drop", [0.0, 0.0001, 0.001, 0.005])
def test_what_loses_forty_samples_holds_nowhere_whatever_is_allowed(allowed_drop: float) -> None:
    scale = scale_of(allowed_drop)
    found = modelled(LOST / SAMPLES, scale)
    assert found.own_share_within(scale.limit).max() < 0.01
    assert found.other_share_within(max(scale.allowed, scale.limit)).max() < 0.1


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
    assert (scale.allowed, scale.limit, scale.unit, scale.luck) == (0.0, 0.0, 0.002, 0.002)
    assert loss_scale(0.0, [0.5], quality, "1%").unit > 0
