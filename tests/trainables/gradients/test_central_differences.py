"""Central differences against closed forms, autograd in float64 and the loop that changes one weight at a time."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable

import numpy as np
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
from trainables.gradients.central_differences import least_epsilon


class Recurrent(nn.Module):
    """A network that vmap cannot batch, with dropout between its layers, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.norm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.network(x)[0][:, -1]).pow(3).mean()


SEQUENCES = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
#: The support's cases, and one whose weights are changed in place, one after the other.
ALL = {**CASES, "one by one": (Recurrent().double(), lambda model: model(SEQUENCES))}


def loop(loss: Callable[[nn.Module], Tensor], model: nn.Module, epsilon: float, name: str) -> Tensor:
    """The definition: two forward passes a weight, the model copied for each."""
    slopes = torch.zeros_like(dict(model.named_parameters())[name])
    for index in range(slopes.numel()):
        values = []
        for sign in (1, -1):
            changed = copy.deepcopy(model)
            with torch.no_grad():
                dict(changed.named_parameters())[name].view(-1)[index] += sign * epsilon
                torch.manual_seed(7)
                values.append(loss(changed))
        slopes.view(-1)[index] = (values[0] - values[1]) / (2 * epsilon)
    return slopes


@pytest.mark.filterwarnings("ignore:the loss cannot be evaluated for many")
@pytest.mark.parametrize("case", [name for name in CASES if name != "dropout"])
def test_agrees_with_autograd_in_float64(case: str) -> None:
    model, loss = CASES[case]
    found = central_difference(loss, model, 1e-4)
    exact = autograd_gradient(loss, model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert relative_error(found, exact) < 1e-6
    # The function that gives the reference is torch's own backward pass.
    copied = copy.deepcopy(model)
    loss(copied).backward()
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(exact[name], parameter.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss cannot be evaluated for many")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.thorough] * (c in ("one by one", "convolutions", "attention"))) for c in ALL],
)
def test_is_the_loop_over_single_weights(case: str) -> None:
    model, loss = ALL[case]
    torch.manual_seed(7)
    found = central_difference(loss, model, 0.1, memory_bytes=2**13)
    for name in list(found)[:: max(1, len(found) // 4)]:
        torch.testing.assert_close(found[name], loop(loss, model, 0.1, name), rtol=1e-9, atol=1e-12)


def test_a_quadratic_is_exact_and_a_cubic_errs_by_its_third_derivative() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    w = model.weight.detach().clone()
    found = central_difference(lambda m: (m.weight**2).sum() + (m.weight**3).sum(), model, 0.1)["weight"]
    torch.testing.assert_close(found, 2 * w + 3 * w**2 + 0.1**2)


@pytest.mark.parametrize("case", ["batch norm", "dropout", "tied", "one by one"])
def test_nothing_is_moved(case: str) -> None:
    model, loss = ALL[case]
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    modes = [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        central_difference(loss, model)
        autograd_gradient(loss, model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert modes == [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()


class Stopped(Exception):
    """What a user's loss may raise."""


def test_all_is_put_back_after_an_exception_in_the_loss() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    before, state, calls = copy.deepcopy(model.state_dict()), torch.get_rng_state(), iter(range(9))

    def loss(m: nn.Module) -> Tensor:
        if next(calls) == 3:
            raise Stopped
        return m(x + torch.randn(5, 3, dtype=torch.float64)).square().sum()

    with pytest.raises(Stopped):
        central_difference(loss, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model[1].track_running_stats


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_weight_that_is_computed_is_changed_where_it_comes_from() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)

    def loss(m: nn.Module) -> Tensor:
        return m(x).sin().sum()

    found = central_difference(loss, model, 1e-4)
    assert set(found) == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}
    assert relative_error(found, autograd_gradient(loss, model)) < 1e-6


def test_names_and_patterns_choose() -> None:
    model, loss = CASES["convolutions"]
    some = central_difference(loss, model, 1e-3, names=["0.*", "11.bias"])
    assert list(some) == ["0.weight", "0.bias", "11.bias"]
    everything = central_difference(loss, model, 1e-3)
    assert all(torch.equal(some[name], everything[name]) for name in some)
    frozen = copy.deepcopy(model)
    frozen[0].requires_grad_(False)
    assert "0.weight" not in central_difference(loss, frozen, 1e-3)
    assert list(central_difference(loss, frozen, 1e-3, "0.bias")) == ["0.bias"]


#: Drawn anew at each evaluation, from no generator that could be put back.
DRAWN = iter(range(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon must be a number above 0, got 0\.0"),
        ({"epsilon": float("nan")}, "epsilon must be a number above 0, got nan"),
        ({"epsilon": 1e-20}, r"epsilon must be above \S+ to change the weights of 0\.weight \(float64\), got 1e-20"),
        ({"names": "2.wieght"}, r"unknown parameter '2.wieght': did you mean '2.weight'\? Valid: 0.bias"),
        ({"names": ["conv*"]}, r"unknown parameter 'conv\*'"),
        ({"loss": lambda m: m(torch.ones(2, 3, dtype=torch.float64))},
         r"loss\(model\) must return a scalar tensor, got shape \(2, 2\): take its mean"),
        ({"epsilon": True}, "epsilon must be a number above 0, got True"),
        ({"loss": lambda m: (m(torch.ones(2, 3, dtype=torch.float64)) > 0).sum()},
         r"loss\(model\) must return a floating-point number, got torch.int64: add .float\(\)"),
        ({"loss": lambda m: 0.5}, r"loss\(model\) must return a scalar tensor, got float: leave its .item\(\) out"),
        ({"loss": lambda m: m.get_parameter("0.bias").sum() + next(DRAWN)},
         r"loss\(model\) must be deterministic, got \S+ and \S+ for the same parameters: evaluate it on one fixed"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(change: dict[str, object], message: str) -> None:
    model, loss = CASES["regularized"]
    with pytest.raises(UserError, match=message) as error:
        central_difference(**{"loss": loss, "model": model, **change})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_other_refusals() -> None:
    renormed = nn.Sequential(nn.Embedding(7, 5, max_norm=0.5), nn.Linear(5, 2))
    before = renormed[0].weight.detach().clone()
    with pytest.raises(UserError, match=r"Embedding '0' must not write its weight in forward passes, got max_norm=0.5"):
        central_difference(lambda m: m(torch.arange(7)).sin().sum(), renormed, names="1.*")
    assert torch.equal(renormed[0].weight, before)
    model = nn.Linear(2, 2)
    whole = nn.Module()
    whole.register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    with pytest.raises(UserError, match=r"parameter counts must have floating-point numbers, got torch.int64: leave"):
        central_difference(lambda m: m.counts.sum(), whole, names="counts")
    with pytest.raises(UserError, match="the model has no parameter that requires a gradient: name those"):
        central_difference(lambda m: m.weight.sum(), model.requires_grad_(False))
    with pytest.raises(UserError, match=r"lr must be above 0, got 0"):
        NormalisedSGD(model.parameters(), lr=0)
    with pytest.raises(UserError, match=r"step\(loss\) needs the loss"):
        CentralDifferenceSGD(model.requires_grad_()).step()


def test_warnings_tell_what_an_estimate_is_worth() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(5, 3)

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    with pytest.warns(UserWarning, match=r"epsilon=0.0001 is below 0.0003, where rounding of a loss in float32"):
        central_difference(loss, model.eval(), 1e-4)
    with pytest.warns(UserWarning, match="the loss cannot be evaluated for many weights at once, so it is evaluated"):
        central_difference(lambda m: m(x).square().mean() * (2.0 if m(x).sum() > 0 else 1.0), model, names="2.bias")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        central_difference(loss, model)
    assert least_epsilon(torch.bfloat16) > 0.08


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


def test_a_diverged_loss_is_refused_with_the_way_out() -> None:
    model = Point(-1.0, 2.0, math.inf, 3.0)
    optimizer = CentralDifferenceSGD(model, lr=0.1, epsilon=0.02, normalise=False)
    with pytest.raises(TrainingDiverged, match="before a step of CentralDifferenceSGD: give normalise=True, or"):
        optimizer.step(lambda m: rosenbrock(m.x))
    model = Point(-1.0, 2.0)
    with pytest.raises(TrainingDiverged, match="the loss is inf before a step of CentralDifferenceSGD"):
        CentralDifferenceSGD(model, epsilon=0.02).step(lambda m: m.x.square().sum() / 0)
