"""Schedules set to absolute epochs, against torch's own stepped one by one, and ours against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lr_schedules import PLATEAU, TORCH, rates, sgd
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from trainables.compression.lr_schedulers import build_lr_scheduler
from trainables.compression.policies import LRPolicy
from trainables.compression.scheduler import CompressionScheduler

pytestmark = pytest.mark.filterwarnings("error")

EPOCHS = 30


def stepped(class_name: str, arguments: dict[str, Any], optimizer: Optimizer, key: str = "lr") -> list[list[Any]]:
    """What torch's own schedule gives in the epochs 0 to 29."""
    schedule = getattr(torch_schedulers, class_name)(optimizer, **arguments)
    found = []
    for _ in range(EPOCHS):
        found.append([group[key] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("class_name", "arguments"), TORCH)
def test_epoch_after_epoch_is_as_torch_steps(class_name: str, arguments: dict[str, Any]) -> None:
    expected = stepped(class_name, arguments, sgd(0.5, 0.02))
    optimizer = sgd(0.5, 0.02)
    schedule = build_lr_scheduler(class_name, arguments, optimizer)
    assert rates(optimizer) == [0.5, 0.02]  # nothing before its time
    assert schedule.metric is None
    for epoch in range(EPOCHS):
        schedule.step_to(epoch)
        assert rates(optimizer) == pytest.approx(expected[epoch], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("class_name", "arguments"), [*TORCH, ("LinearLR", {"start_factor": 0.1, "total_iters": 3})])
def test_a_policy_from_epoch_0_gives_the_rates_of_torchs_own_loop_in_every_epoch(
    class_name: str, arguments: dict[str, Any]
) -> None:
    theirs, ours = sgd(0.5, 0.02), sgd(0.5, 0.02)
    reference = getattr(torch_schedulers, class_name)(theirs, **arguments)
    scheduler = CompressionScheduler(nn.Linear(2, 2), ours)
    scheduler.add_policy(LRPolicy(build_lr_scheduler(class_name, arguments, ours)), ending_epoch=EPOCHS - 1)
    for epoch in range(EPOCHS):
        scheduler.on_epoch_begin(epoch)
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-9, abs=1e-15)
        assert ours.param_groups[0]["momentum"] == pytest.approx(theirs.param_groups[0]["momentum"])
        theirs.step()
        if epoch < EPOCHS - 1:
            reference.step()
        scheduler.on_epoch_end(epoch)


def test_a_warm_up_begins_low() -> None:
    optimizer = sgd(0.05)
    scheduler = CompressionScheduler(nn.Linear(2, 2), optimizer)
    warm_up = build_lr_scheduler("LinearLR", {"start_factor": 0.1, "total_iters": 3}, optimizer)
    scheduler.add_policy(LRPolicy(warm_up), ending_epoch=4)
    found = []
    for epoch in range(4):
        scheduler.on_epoch_begin(epoch)
        found += rates(optimizer)
        scheduler.on_epoch_end(epoch)
    assert found == pytest.approx([0.005, 0.02, 0.035, 0.05])


def test_a_policy_that_begins_later_changes_nothing_before_its_first_end() -> None:
    optimizer = sgd(0.5)
    scheduler = CompressionScheduler(nn.Linear(2, 2), optimizer)
    scheduler.add_policy(
        LRPolicy(build_lr_scheduler("ExponentialLR", {"gamma": 0.5}, optimizer)), starting_epoch=2, ending_epoch=4
    )
    found = []
    for epoch in range(4):
        scheduler.on_epoch_begin(epoch)
        found += rates(optimizer)
        scheduler.on_epoch_end(epoch)
    assert found == pytest.approx([0.5, 0.5, 0.5, 0.5 * 0.5**3])


@pytest.mark.parametrize(("class_name", "arguments"), TORCH)
def test_any_epoch_comes_at_once_and_in_any_order(class_name: str, arguments: dict[str, Any]) -> None:
    expected = stepped(class_name, arguments, sgd(0.5, 0.02))
    optimizer = sgd(0.5, 0.02)
    schedule = build_lr_scheduler(class_name, arguments, optimizer)
    for epoch in (17, 3, 3, 29, 0, 12):
        schedule.step_to(epoch)
        assert rates(optimizer) == pytest.approx(expected[epoch], rel=1e-9, abs=1e-15)


def test_of_adam_the_first_beta_moves() -> None:
    arguments = {"max_lr": 0.3, "total_steps": 30}
    weights = [nn.Parameter(torch.zeros(2))]
    expected = stepped("OneCycleLR", arguments, Adam(weights, lr=0.1), key="betas")
    optimizer = Adam(weights, lr=0.1)
    build_lr_scheduler("OneCycleLR", arguments, optimizer).step_to(14)
    assert optimizer.param_groups[0]["betas"] == pytest.approx(expected[14][0])
    assert optimizer.param_groups[0]["betas"][1] == 0.999


@pytest.mark.parametrize("power", [1, 2, 0.9])
def test_our_polynomial(power: float) -> None:
    optimizer = sgd(0.5, 0.02)
    schedule = build_lr_scheduler("PolynomialLR", {"T_max": 10, "power": power}, optimizer)
    for epoch in range(11):
        schedule.step_to(epoch)
        assert rates(optimizer) == pytest.approx([base * (1 - epoch / 10) ** power for base in (0.5, 0.02)])
    schedule.step_to(11)
    assert rates(optimizer) == [0, 0]


def test_multi_gamma_multiplies_the_gammas_of_the_milestones_passed() -> None:
    optimizer = sgd(0.4)
    schedule = build_lr_scheduler(
        "MultiStepMultiGammaLR", {"milestones": [2, 5, 9], "gammas": [0.1, 0.5, 3.0]}, optimizer
    )
    factors = []
    for epoch in range(12):
        schedule.step_to(epoch)
        factors.append(rates(optimizer)[0] / 0.4)
    assert factors == pytest.approx([1] * 2 + [0.1] * 3 + [0.05] * 4 + [0.15] * 3)


LOSSES = [3.0, 2.0, 2.0, 2.0, 1.9, 1.9, 2.0, 2.1, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_goes_by_its_metric_as_torchs_does(mode: str) -> None:
    theirs, ours = sgd(0.5, 0.1), sgd(0.5, 0.1)
    reference = torch_schedulers.ReduceLROnPlateau(theirs, mode=mode, **PLATEAU)  # type: ignore[arg-type]
    schedule = build_lr_scheduler("ReduceLROnPlateau", {"mode": mode, **PLATEAU}, ours)
    assert schedule.metric == mode
    seen = set()
    for epoch, loss in enumerate(LOSSES):
        value = loss if mode == "min" else 1 / loss
        reference.step(value)
        schedule.step_to(epoch + 1, value)
        assert rates(ours) == rates(theirs)
        seen.add(rates(ours)[0])
    assert len(seen) > 3


def test_plateau_without_its_metric() -> None:
    schedule = build_lr_scheduler("ReduceLROnPlateau", {"mode": "max"}, sgd(0.1))
    with pytest.raises(ValueError, match=r"^ReduceLROnPlateau needs the epoch's accuracy$"):
        schedule.step_to(1)
