"""The doctor's checks, each on a training that has the fault and on one that has not; training that repeats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import tiny_workload
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainables.config import TrialConfig
from trainables.training.doctor import checks
from trainables.training.doctor.determinism import why_not_repeatable
from trainables.training.doctor.observation import ModelCall, scaled_clipping, zeroed_gradients

CPU = torch.device("cpu")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 3)
    )


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))), batch_size=8)


def names(findings: Any) -> list[str]:
    return [finding.name for finding in findings]


def test_faults_of_each_network_are_told_with_their_mend_and_nothing_is_changed() -> None:
    model, other = make(), nn.Sequential(nn.Linear(2, 2))
    calls = {model: ModelCall((torch.randn(8, 1, 6, 6),)), other: None}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = checks.examine(CPU, calls, [torch.optim.Adam(model.parameters(), fused=True)], zeroed={"train.py:7"})
    assert names(found.findings) == ["gradients-set-to-zero", "bias-before-batch-norm"]
    assert "in train.py:7: each gradient" in found.findings[0].what
    bias = found.findings[1]
    assert bias.what.startswith("in Sequential, 1 layer has a bias that the batch norm behind subtracts again: 4 param")
    assert str(found).startswith("recipe: 2 to mend (docs/recipe.md)\ngradients-set-to-zero: ")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    exec(bias.mend[0], {"model": model})
    assert model[0].bias is None
    assert str(checks.examine(CPU, calls, [])).startswith("recipe: nothing found")


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0.9, 0.7, 0.8], "20.0 % of a step (10.0 % to 30.0 %, 3 pairs)"),
        ([0.9, 1.1], "none measurable here: -10.0 % to 10.0 % of a step (2 pairs)"),
        ([0.5, 1.1], "cannot be told here: times of a step vary too much (2 pairs)"),
    ],
)
def test_a_cost_is_the_median_with_its_range_or_said_to_be_unknown(ratios: list[float], words: str) -> None:
    assert checks.saving_text(ratios, "a step") == words


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping_before_unscale_is_found(clip: Any, unscaled: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    with scaled_clipping() as places:
        scaler.scale(model(torch.ones(4, 3)).sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert bool(places) is not unscaled
    assert all(place.startswith(f"{__file__}:") for place in places)


GOOD = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, pin_memory=True)
SLOW = ["loader-without-workers", "loader-without-pinned-memory"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (checks.examine(CPU, {nn.DataParallel(make()): None}, []).findings, ["data-parallel"]),
        (checks.loading(loader(), 0.02, on_gpu_machine=True), SLOW),
        (checks.loading(GOOD, 0.02, on_gpu_machine=True), []),
        (checks.loading(loader(), 0.02, on_gpu_machine=False), []),
        (checks.loading(loader(), 0.2, on_gpu_machine=False), ["data-loading"]),
    ],
)
def test_what_is_seen_without_running_anything(found: Any, expected: list[str]) -> None:
    assert names(found) == expected


def test_an_optimizer_of_several_kernels_is_measured_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def measured(mended: Callable[[], object], plain: Callable[[], object], _: torch.device) -> tuple[float, ...]:
        steps.append((mended(), plain()))
        return speeds

    monkeypatch.setattr(checks, "time_ratios", measured)  # no test is decided by a clock
    speeds: tuple[float, ...] = (0.4, 0.5, 0.6)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    before = [p.clone() for p in model.parameters()]
    (found,) = checks.slow_optimizer(optimizer, CPU)
    assert found.mend == ("torch.optim.AdamW(..., fused=True)",)
    assert found.cost == "50.0 % of an optimizer step (40.0 % to 60.0 %, 3 pairs)"
    assert len(steps) == 1
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert names(checks.slow_optimizer(torch.optim.AdamW(model.parameters(), fused=True), CPU)) == []
    assert names(checks.slow_optimizer(torch.optim.LBFGS(model.parameters()), CPU)) == []
    speeds = (0.8, 0.95)
    assert names(checks.slow_optimizer(optimizer, CPU)) == []


def test_gradients_set_to_zero_are_found_only_where_there_are_any() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = torch.optim.Optimizer.zero_grad
    with zeroed_gradients() as places:
        optimizer.zero_grad(set_to_none=False)  # there are none yet
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()
        assert places == set()
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=False)
    assert len(places) == 1
    assert torch.optim.Optimizer.zero_grad is original


@pytest.mark.usefixtures("tiny")
def test_a_cpu_repeats_bit_for_bit() -> None:
    assert why_not_repeatable(TrialConfig(workload="tiny", epochs=1)) == ""


@pytest.mark.usefixtures("tiny")
def test_a_loss_that_rounds_otherwise_each_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels do whose sums are made in changing order."""
    calls = count()
    real = tiny_workload.Tiny.loss

    def loss(self: tiny_workload.Tiny, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return real(self, model, batch) * (1 + next(calls) % 3 * torch.finfo(torch.float32).eps)

    monkeypatch.setattr(tiny_workload.Tiny, "loss", loss)
    assert why_not_repeatable(TrialConfig(workload="tiny", epochs=1)).startswith("0.weight and ")
