"""Gradient statistics: numbers against closed forms and full loops, and not a bit of interference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sampled_nets import cross_entropy as loss
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainables.errors import UserError
from trainables.gradients import (
    SVRG,
    GradientStatistics,
)
from trainables.gradients.gradient_statistics import RunningMoments, moments_of


def filled(rows: Tensor) -> RunningMoments:
    moments = RunningMoments()
    for row in rows:
        moments.add({"a": row[:4].clone(), "b": row[4:].view(2, -1).clone()})
    return moments


@pytest.mark.parametrize("scale", [1e-18, 1e-5, 1.0, 1e6])
def test_moments_are_numpys_at_any_scale(scale: float) -> None:
    rows = torch.randn(30, 10, generator=torch.Generator().manual_seed(0)) * scale + 0.3 * scale
    rows[:, 5] = 0  # an element without any gradient
    found = moments_of(filled(rows))
    for name, part in (("a", rows[:, :4]), ("b", rows[:, 4:]), ("", rows)):
        table = part.double().numpy()
        variances, squares = table.var(0, ddof=1), (table**2).mean(0)
        some = squares > 0
        assert found[name].mean == pytest.approx(table.mean(0).mean(), rel=1e-4)
        assert found[name].norm == pytest.approx(np.linalg.norm(table.mean(0)), rel=1e-5)
        assert found[name].average_variance == pytest.approx(variances.mean(), rel=1e-5)
        assert found[name].normalised_variance == pytest.approx((variances[some] / squares[some]).mean(), rel=1e-4)
        signal = (table.mean(0) ** 2 - variances / 30).sum()
        assert found[name].snr == pytest.approx(signal / variances.sum(), rel=1e-3)
        assert found[name].bias == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_bias_is_relative_to_the_reference_and_its_noise_is_what_chance_gives() -> None:
    biases, noises = [], []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(20, 10, generator=generator, dtype=torch.float64) for _ in range(2))
        found = moments_of(filled(first), filled(second))[""]
        biases.append(found.bias**2)
        noises.append(found.bias_noise**2)
    assert np.mean(biases) == pytest.approx(np.mean(noises), rel=0.1)
    assert np.mean(noises) == pytest.approx(10 * 2 / 20, rel=0.05)
    shifted = moments_of(filled(torch.ones(3, 10)), filled(torch.zeros(3, 10)))[""]
    assert shifted.bias == pytest.approx(10**0.5)
    assert (shifted.bias_noise, shifted.snr) == (0, float("inf"))
    assert np.isnan(moments_of(filled(torch.zeros(3, 10)))[""].normalised_variance)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip


def data(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


@pytest.mark.thorough
@pytest.mark.slow
def test_statistics_are_those_of_a_full_loop_over_all_batches() -> None:
    """Every batch of two of ten samples, once: the variance that T draws estimate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randint(0, 2, (10,))
    every = []
    for pair in itertools.combinations(range(10), 2):
        batch = (x[list(pair)], y[list(pair)])
        every.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, batch), list(model.parameters()))])
        )
    table = torch.stack(every)
    statistics = GradientStatistics(model, (x, y), samples=3000, loss=loss, batch_size=2)
    (found,) = statistics.measure(0)
    variances, squares = table.var(0, correction=0), table.square().mean(0)
    assert found.total.average_variance == pytest.approx(float(variances.mean()), rel=0.05)
    assert found.total.normalised_variance == pytest.approx(float((variances / squares).mean()), rel=0.03)
    assert found.total.norm == pytest.approx(float(table.mean(0).norm()), rel=0.05)
    assert set(found.layers) == {"weight", "bias"}


def test_svrg_right_after_its_snapshot_has_no_variance_and_no_bias() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 3).double()
    rows = (data()[0].flatten(1).double(), data()[1])
    svrg = SVRG(model, loss, rows, batch_size=8)
    svrg.snapshot()
    statistics = GradientStatistics(model, rows, samples=12, loss=loss, batch_size=8)
    sgd, found = statistics.measure(0, svrg)
    assert (sgd.estimator, found.estimator) == ("sgd", "svrg")
    assert found.total.average_variance < 1e-25 < 1e-6 < sgd.total.average_variance
    assert found.total.bias < 4 * found.total.bias_noise
    assert found.gradient_evaluations == 24  # two gradients each
    assert sgd.gradient_evaluations == 12
    rows_ = statistics.rows()
    assert len(rows_) == 2 * 3
    assert {row["layer"] for row in rows_} == {"", "weight", "bias"}


@pytest.mark.parametrize(("total", "count"), [(1000, 20), (7, 20), (10, 3), (300, 7), (1, 1)])
def test_measurements_are_spread_over_the_training(total: int, count: int) -> None:
    statistics = GradientStatistics(net(), data(), count, 2, loss=loss, total_steps=total, batch_size=8)
    due = [step for step in range(total) if statistics.is_due(step)]
    assert len(due) == min(total, count)
    assert due[0] == 0
    gaps = np.diff([*due, total])
    assert max(gaps) - min(gaps) <= 1
    assert statistics.measure(1) == [] or total == 7


def test_a_stream_has_no_numbers() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from zip(*data(), strict=True)

    with pytest.raises(UserError, match=r"an iterable stream \(Stream\) has none: keep a bounded part of it"):
        GradientStatistics(net(), DataLoader(Stream(), batch_size=8), loss=loss)
