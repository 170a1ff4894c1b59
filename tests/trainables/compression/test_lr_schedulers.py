"""Schedules set to absolute epochs, against torch's own stepped one by one, and ours against their formulas; their
state, base rates, and the arguments that they refuse.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from lr_schedules import PLATEAU, TORCH, rates, sgd
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from trainables.compression.lr_schedulers import build_lr_scheduler, check_lr_scheduler
from trainables.compression.policies import LRPolicy
from trainables.compression.scheduler import CompressionScheduler
from trainables.errors import UserError

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


# --- state, base rates, refused arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("class_name", "arguments"), [*TORCH, ("MultiStepMultiGammaLR", {"milestones": [2], "gammas": [0.5]})]
)
def test_a_resumed_schedule_gives_the_same_rates(class_name: str, arguments: dict[str, Any]) -> None:
    optimizer = sgd(0.5, 0.02)
    schedule = build_lr_scheduler(class_name, arguments, optimizer)
    schedule.step_to(5)
    # The optimizer's own state is loaded after the schedule is built, and was another before.
    other = sgd(7.0, 7.0)
    resumed = build_lr_scheduler(class_name, arguments, other)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    for epoch in (6, 7, 20):
        schedule.step_to(epoch)
        resumed.step_to(epoch)
        assert rates(other) == rates(optimizer)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = Adam([nn.Parameter(torch.zeros(2))], lr=rate, foreach=False)
    schedule = build_lr_scheduler("ExponentialLR", {"gamma": 0.5}, optimizer)
    schedule.step_to(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    schedule.step_to(1)
    assert rate.item() == 0.25


BAD = [
    ("StepLr", {}, "unknown class of lr_schedulers 'StepLr': did you mean 'StepLR'? Valid: ConstantLR, "
     "CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, ExponentialLR, LinearLR, MultiStepLR, "
     "MultiStepMultiGammaLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau, StepLR"),
    ("LambdaLR", {}, "LambdaLR needs functions or other schedules, which a schedule's text cannot hold: use another "
     "class, and a policy for each part of the time"),
    ("StepLR", {"step_size": 3, "gama": 0.1}, "unknown argument of StepLR 'gama': did you mean 'gamma'? "
     "Valid: gamma, step_size in StepLR(step_size, gamma=0.1)"),
    ("StepLR", {"gamma": 0.1}, "StepLR needs step_size: StepLR(step_size, gamma=0.1)"),
    ("StepLR", {"step_size": 2.5}, "step_size of StepLR must be a whole number >= 1, got 2.5: "
     "StepLR(step_size, gamma=0.1)"),
    ("PolynomialLR", {"T_max": 3, "total_iters": 3, "power": 1},
     "unknown argument of PolynomialLR 'total_iters': Valid: T_max, power in PolynomialLR(T_max, power)"),
    ("MultiStepMultiGammaLR", {"milestones": [5, 2], "gammas": [1, 1]},
     "milestones of MultiStepMultiGammaLR must ascend, got [5, 2]"),
    ("MultiStepMultiGammaLR", {"milestones": [5], "gammas": [1, 1]},
     "MultiStepMultiGammaLR needs one gamma for each milestone, got 2 gammas for 1 milestones"),
    ("ReduceLROnPlateau", {"factor": 1.5}, "ReduceLROnPlateau refuses its arguments: Factor should be < 1.0."),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2, "scale_fn": "sqrt"}, "scale_fn of CyclicLR must be left out, for it "
     "is a function, got 'sqrt': CyclicLR(base_lr, max_lr, step_size_up=2000, step_size_down=None, "
     "mode='triangular', gamma=1.0, scale_fn=None, scale_mode='cycle', cycle_momentum=True, base_momentum=0.8, "
     "max_momentum=0.9)"),
]  # fmt: skip


@pytest.mark.parametrize(("class_name", "arguments", "message"), BAD)
def test_bad_arguments_are_named(class_name: str, arguments: dict[str, Any], message: str) -> None:
    for refused in (
        lambda: check_lr_scheduler(class_name, arguments),
        lambda: build_lr_scheduler(class_name, arguments, sgd(0.1)),
    ):
        with pytest.raises(UserError) as raised:
            refused()
        assert str(raised.value) == message


def test_a_schedule_that_ends_says_so() -> None:
    schedule = build_lr_scheduler("OneCycleLR", {"max_lr": 0.1, "total_steps": 4}, sgd(0.1))
    for epoch in (6, 5):
        with pytest.raises(UserError) as raised:
            schedule.step_to(epoch)
        assert str(raised.value) == (
            f"OneCycleLR has no epoch {epoch}: Tried to step 5 times. The specified number of total steps is 4"
        )
    schedule.step_to(2)
