"""A dry run's numbers against whole runs, closed forms and a clock that moves as the test says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_workload
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.training import flops as cost
from trainables.training.doctor import checks
from trainables.training.doctor import dry_run as module
from trainables.training.doctor.dry_run import DryRun, dry_run
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch
from trainables.workloads.digits import CONVOLUTIONS, IMAGE_SIZE


@pytest.fixture(scope="module")
def digits() -> DryRun:
    return dry_run(TrialConfig(epochs=2), steps=2)


def test_length_and_shapes(digits: DryRun) -> None:
    assert (digits.steps_per_epoch, digits.train_samples, digits.epochs, digits.total_steps) == (10, 599, 2, 20)
    assert digits.batch_shapes == (((64, 1, 16, 16), "float32"), ((64,), "int64"))


def test_flops_of_a_run_are_those_of_the_run(digits: DryRun) -> None:
    """The last batch of digits is smaller, and a run counts it as it is."""
    with TrainingRun(TrialConfig(method="none", epochs=2)) as run:
        run.train_epoch()
        row = run.train_epoch()
    assert digits.run_flops == row["dense_flops"]


def test_rows_are_the_models_parameters(digits: DryRun) -> None:
    rows = digits.parameters
    assert [row.name for row in rows[:4]] == ["conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight"]
    assert [row.number for row in rows] == list(range(20))
    assert rows[3].shape == (8, 8, 3, 3)
    assert rows[3].elements == 8 * 8 * 9
    assert [row.number for row in rows if row.watched] == [0, 3, 6, 9, 12, 15]
    assert [row.number for row in rows if row.unit_end] == [2, 5, 8, 11, 14, 17]


def test_what_stopping_through_a_unit_saves_is_the_closed_form(digits: DryRun) -> None:
    """Weight gradients of the units 1..k and input gradients of the convolutions 2..k+1."""
    forward, channels, size = [], 1, IMAGE_SIZE
    for width, stride in CONVOLUTIONS:
        size //= stride
        forward.append(2 * 9 * channels * width * size * size)
        channels = width
    linear = 2 * 32 * 10
    dense = 3 * sum(forward) - forward[0] + 3 * linear
    expected = {
        3 * k - 1: (sum(forward[:k]) + sum(forward[1 : k + 1]) + (linear if k == 6 else 0)) / dense for k in range(1, 7)
    }
    assert {row.number: row.saved for row in digits.parameters if row.saved is not None} == pytest.approx(
        expected, rel=1e-12
    )


def test_memory_is_that_of_float32_with_momentum(digits: DryRun) -> None:
    elements = sum(row.elements for row in digits.parameters)
    assert digits.parameter_bytes == digits.gradient_bytes == digits.optimizer_bytes == 4 * elements
    assert digits.peak_bytes > 50_000_000  # a process with torch in it


class Clock:
    """Stands for the module time; moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tiny: str) -> Clock:  # noqa: F811 - the fixture
    """Batches take 1 s, the first of an epoch 3 s; a loss 4 s; an evaluation 10 s."""
    clock = Clock()
    batches, loss, evaluate = (getattr(tiny_workload.Tiny, n) for n in ("train_batches", "loss", "evaluate"))

    def slow_batches(self: tiny_workload.Tiny, epoch: int, seed: int) -> Iterator[Batch]:
        for number, batch in enumerate(batches(self, epoch, seed)):
            clock.now_s += 1.0 if number else 3.0
            yield batch

    def slow_loss(self: tiny_workload.Tiny, model: nn.Module, batch: Batch) -> Tensor:
        clock.now_s += 0.0 if batch[0].is_meta else 4.0
        found: Tensor = loss(self, model, batch)
        return found

    def slow_evaluate(self: tiny_workload.Tiny, model: nn.Module, split: str, device: Any) -> float:
        clock.now_s += 10.0
        return float(evaluate(self, model, split, device))

    for name, slow in (("train_batches", slow_batches), ("loss", slow_loss), ("evaluate", slow_evaluate)):
        monkeypatch.setattr(tiny_workload.Tiny, name, slow)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(cost, "time", clock)  # what counting takes is taken off
    return clock


def test_times_after_a_warm_up(clock: Clock) -> None:
    times = dry_run(TrialConfig(workload="tiny", epochs=1), steps=2)
    assert times.step_times_s == (5.0, 5.0)
    assert times.loader_times_s == (1.0, 1.0)
    assert times.loader_share == 0.2
    assert times.evaluation_time_s == 10.0


def test_a_run_of_one_step_has_that_one(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(tiny_workload.Tiny, "steps_per_epoch", 1)
    times = dry_run(TrialConfig(workload="tiny", epochs=1))
    assert times.step_times_s == (7.0,)
    assert times.loader_times_s == (3.0,)


def test_a_search_is_so_many_runs_in_rounds(digits: DryRun) -> None:
    found = replace(digits, step_times_s=(1.0, 3.0, 2.0), loader_times_s=(0.0, 1.5, 1.5), evaluation_time_s=5.0)
    assert found.step_time_s == 2.0
    assert found.loader_share == 0.5
    assert found.run_time_s == 2 * (10 * 2.0 + 5.0)


@pytest.mark.usefixtures("tiny")
def test_no_method_acts() -> None:
    stopping = TrialConfig(workload="tiny", epochs=1, CAC_STOP_LAYER_NUM=(8,), CAC_STOP_LAYER_ITR=(0,))
    found = dry_run(stopping, steps=2)
    assert found.gradient_bytes == found.parameter_bytes


def test_norms_that_leave_their_earlier_statistics_are_told_by_how_much() -> None:
    """Against the means of the batches themselves: inputs that are three deviations away from what the norm had."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2), nn.BatchNorm1d(2))
    norm = model[0]
    norm.running_mean.fill_(1.0)  # type: ignore[union-attr, operator]
    norm.running_var.fill_(4.0)  # type: ignore[union-attr, operator]
    known = module.earlier_statistics(model)
    assert list(known) == [norm]  # the other one has none
    batches = [3 * torch.randn(400, 5) + 7 for _ in range(6)]
    for batch in batches:
        model(batch)
    distance = torch.stack([(batch.mean(0) - 1) / 2 for batch in batches]).mean()
    ratio = torch.stack([batch.var(0) / 4 for batch in batches]).mean()
    (moved,) = module.moved_norms(known, len(batches))
    assert moved == pytest.approx((float(distance), float(ratio)), rel=0.05)
