"""Optimizers along central differences and along gradients of unit length, against torch's own steps."""

from __future__ import annotations

import copy

import pytest
import torch
from differentiated_models import CASES
from torch import Tensor, nn

from trainables.errors import TrainingDiverged, UserError
from trainables.gradients import (
    CentralDifferenceSGD,
    NormalisedSGD,
    autograd_gradient,
    central_difference,
    relative_error,
)


def rosenbrock(x: Tensor) -> Tensor:
    odd, even = x.view(-1, 2).unbind(1)
    return (100 * (odd**2 - even) ** 2 + (odd - 1) ** 2).sum()


class Point(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_descends_by_steps_of_the_learning_rate_and_any_schedule_decays_epsilon_too() -> None:
    model = Point(-1.0, 2.0, 3.0, 3.0)
    optimizer = CentralDifferenceSGD(model, lr=0.05, epsilon=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    lengths, epsilons, values = [], [], []
    for _ in range(4):
        before = model.x.detach().clone()
        epsilons.append(optimizer.epsilon)
        values.append(optimizer.step(lambda m: rosenbrock(m.x)))
        lengths.append(float((model.x.detach() - before).norm()))
        schedule.step()
    assert lengths == pytest.approx([0.05, 0.05, 0.005, 0.005])
    assert epsilons == pytest.approx([0.02, 0.02, 0.002, 0.002])
    assert float(values[0]) == (100 + 4) + (3600 + 4)
    fixed = CentralDifferenceSGD(model, lr=0.05, epsilon=0.02, epsilon_follows_lr=False)
    fixed.param_groups[0]["lr"] = 1e-3
    assert fixed.epsilon == 0.02


def test_a_plain_step_is_torchs_on_the_estimate() -> None:
    model, loss = copy.deepcopy(CASES["regularized"])
    twin = copy.deepcopy(model)
    CentralDifferenceSGD(model, lr=0.1, epsilon=1e-3, normalise=False).step(loss)
    for name, slopes in central_difference(loss, twin, 1e-3).items():
        dict(twin.named_parameters())[name].grad = slopes
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for mine, torchs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, torchs)


def test_a_loss_that_begins_to_regularize_is_seen() -> None:
    model, loss = copy.deepcopy(CASES["regularized"])
    x = torch.randn(4, 3, dtype=torch.float64)
    optimizer = CentralDifferenceSGD(model, lr=1e-9, epsilon=1e-4)
    optimizer.step(lambda m: m(x).sin().sum())
    reference = autograd_gradient(loss, model)
    optimizer.step(loss)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(found, reference) < 1e-6  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must return a scalar tensor"):
        optimizer.step(lambda m: m(x))


def test_the_optimizer_resumes_bit_for_bit() -> None:
    def steps(model: Point, optimizer: CentralDifferenceSGD, count: int) -> None:
        for _ in range(count):
            optimizer.step(lambda m: rosenbrock(m.x))
            optimizer.param_groups[0]["lr"] *= 0.9

    whole = Point(-1.0, 2.0)
    steps(whole, CentralDifferenceSGD(whole), 10)
    first = Point(-1.0, 2.0)
    optimizer = CentralDifferenceSGD(first)
    steps(first, optimizer, 4)
    second = Point(*first.x.tolist())
    again = CentralDifferenceSGD(second)
    again.load_state_dict(optimizer.state_dict())
    steps(second, again, 6)
    assert torch.equal(whole.x, second.x)


def test_normalised_steps_ignore_a_gradient_of_zero_and_missing_ones() -> None:
    used, unused = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2))
    optimizer = NormalisedSGD([{"params": [used]}, {"params": [unused], "lr": 7.0}], lr=0.5)
    optimizer.step()
    used.grad = torch.zeros(2)
    optimizer.step()
    assert used.tolist() == [3.0, 4.0]
    assert optimizer.step(lambda: (used.square().sum() / 2).backward() or 5) == 5
    torch.testing.assert_close(used.detach(), torch.tensor([2.7, 3.6]))
    assert unused.tolist() == [1.0, 1.0]


def test_plain_steps_that_diverge_are_refused_with_the_way_out() -> None:
    model = Point(-1.0, 2.0, 3.0, 3.0)
    optimizer = CentralDifferenceSGD(model, lr=0.1, epsilon=0.02, normalise=False)
    before = model.x.detach().clone()
    with pytest.raises(
        TrainingDiverged, match=r"would be 73\d long, with weights of norm 4.8: give normalise=True, or"
    ):
        optimizer.step(lambda m: rosenbrock(m.x))
    assert torch.equal(model.x, before)
    with pytest.raises(TrainingDiverged, match="the loss is inf before a step of CentralDifferenceSGD"):
        CentralDifferenceSGD(model, epsilon=0.02).step(lambda m: m.x.square().sum() / 0)
