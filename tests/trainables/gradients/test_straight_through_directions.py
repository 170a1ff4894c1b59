"""Directions against plain backward passes, weights and covariances by hand, and exact gradients."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradients import BinaryActivation, StraightThroughSettings, activation_mode, straight_through_direction
from trainables.gradients.fields import STE_ESTIMATORS as ESTIMATORS
from trainables.gradients.gradient_method import norm_of
from trainables.gradients.straight_through_directions import combined

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
#: Each estimator with settings under which it samples, weights and evaluates.
EVERY: dict[str, dict[str, Any]] = {
    "sign": {},
    "stochastic_rounding": {"samples": 3, "weighting": "effect"},
    "backward_noise": {"samples": 3, "weighting": "effect", "normalise": True},
    "proposal": {"samples": 3, "candidates": 2},
    "nes": {"samples": 3},
}
#: Forward and backward passes of `EVERY`, by hand: n samples; 1 + one for each direction that is weighted.
PASSES = {
    "sign": (1, 1),
    "stochastic_rounding": (3 + 1 + 3, 3),
    "backward_noise": (3 + 1 + 3, 3),
    "proposal": (3 + 1 + 1 + 2, 3),
    "nes": (2 * 3, 0),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), BinaryActivation(), nn.Dropout(0.2),
        nn.Linear(16, 16), BinaryActivation(), nn.Linear(16, 3),
    )  # fmt: skip


def plain_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), BinaryActivation(), nn.Linear(8, 3))


def loss(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


def direction(estimator: str, model: nn.Module, seed: int = 0, **more: Any) -> Any:
    return straight_through_direction(loss, model, StraightThroughSettings(estimator=estimator, **more), seed)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(
    ("estimator", "mode"), [("sign", "sign"), ("stochastic_rounding", "stochastic"), ("backward_noise", "backward")]
)
def test_one_sample_is_a_plain_backward_pass(estimator: str, mode: str) -> None:
    model = net()
    found = direction(estimator, model, seed=7, weighting="effect")  # one sample needs no weight
    assert (found.forward_passes, found.backward_passes) == (1, 1)
    torch.manual_seed(7)
    with activation_mode(model, mode):
        assert_equal(found.gradient, gradients(model))


def test_samples_are_averaged_and_normalised() -> None:
    model = plain_net()
    torch.manual_seed(7)
    with activation_mode(model, "stochastic"):
        samples = [gradients(model) for _ in range(4)]
    assert not torch.equal(samples[0]["0.weight"], samples[1]["0.weight"])
    found = direction("stochastic_rounding", model, seed=7, samples=4).gradient
    mean = {name: torch.stack([sample[name] for sample in samples]).mean(0) for name in samples[0]}
    length = math.sqrt(sum(float(part.square().sum()) for part in mean.values()))
    unit = direction("stochastic_rounding", model, seed=7, samples=4, normalise=True).gradient
    for name in mean:
        torch.testing.assert_close(found[name], mean[name])
        torch.testing.assert_close(unit[name], mean[name] / length)
    assert norm_of(unit.values()) == pytest.approx(1, abs=1e-6)


def test_weights_are_what_a_small_step_lowers_the_plain_loss_by() -> None:
    model, step = plain_net(), 0.3
    torch.manual_seed(5)
    with activation_mode(model, "stochastic"):
        samples = [gradients(model) for _ in range(5)]
    effects = []
    for sample in samples:
        moved = plain_net()
        for name, parameter in moved.named_parameters():
            parameter.data -= step * sample[name] / norm_of(sample.values())
        effects.append(float(loss(model) - loss(moved)))
    gains = [max(0.0, effect) for effect in effects]
    assert sum(gains) > 0
    weighted = direction("stochastic_rounding", model, seed=5, samples=5, weighting="effect", trial_step=step).gradient
    expected = combined(samples, [gain / sum(gains) for gain in gains])
    for name in expected:
        torch.testing.assert_close(weighted[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_proposal_has_the_mean_and_covariance_of_its_samples() -> None:
    """The weights of a candidate on the samples give z (g - mean) / sqrt(n - 1); no candidate is drawn twice."""
    from trainables.gradients.straight_through_directions import _Search

    points = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = StraightThroughSettings(estimator="proposal", samples=6, candidates=20_000)
    mean, *drawn = _Search(loss, plain_net(), settings, 1, None, ())._proposed([{"w": point} for point in points])
    torch.testing.assert_close(mean["w"], points.mean(0))
    cloud = torch.stack([candidate["w"] for candidate in drawn])
    covariance = torch.cov(points.T)
    deviation = covariance.diagonal().sqrt()
    assert ((cloud.mean(0) - points.mean(0)).abs() <= 5 * deviation / math.sqrt(len(drawn))).all()
    # The deviation of a sampled covariance is at most sqrt(2 / N) times the product of both deviations.
    bound = 5 * math.sqrt(2 / len(drawn)) * torch.outer(deviation, deviation)
    assert ((torch.cov(cloud.T) - covariance).abs() <= bound).all()


@pytest.mark.slow
def test_nes_is_the_exact_gradient_of_a_quadratic() -> None:
    """For f = (p w^2 + b w) / 2 summed, E of the estimate is the gradient; its deviation follows from e ~ N(0, I)."""
    curvature, linear = torch.tensor([1.0, 4.0, 0.5]), torch.tensor([-1.0, 2.0, 0.3])
    model = nn.Linear(3, 1, bias=False).double()
    exact = (model.weight * curvature + linear / 2).detach().flatten()

    def quadratic(m: Any) -> Tensor:
        return ((curvature * m.weight.square() + linear * m.weight) / 2).sum()

    pairs = 4000
    settings = StraightThroughSettings(estimator="nes", samples=pairs, sigma=0.5)
    found = straight_through_direction(quadratic, model, settings, seed=0)
    assert (found.forward_passes, found.backward_passes) == (2 * pairs, 0)
    # Antithetic pairs cancel the even part: the estimate is the mean of (g . e) e, of variance |g|^2 + g_i^2.
    deviation = ((exact.square().sum() + exact.square()) / pairs).sqrt()
    assert ((found.gradient["weight"].flatten() - exact).abs() <= 5 * deviation).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_passes_are_those_executed(estimator: str) -> None:
    model, counts = net(), [0, 0]
    model.register_forward_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    model[4].register_full_backward_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
    found = direction(estimator, model, **EVERY[estimator])
    assert (found.forward_passes, found.backward_passes) == tuple(counts) == PASSES[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_seeds_give_equal_directions_and_nothing_else_changes(estimator: str) -> None:
    model = net().eval()
    model[1].train()  # its statistics follow every forward pass
    loss(model).backward()
    pending = loss(model)
    modules = {name: (id(m), m.training, getattr(m, "mode", None)) for name, m in model.named_modules()}
    state = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)
    generators = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())

    first = direction(estimator, model, seed=3, **EVERY[estimator]).gradient
    random.random(), np.random.rand(), torch.rand(1)
    assert_equal(direction(estimator, model, seed=3, **EVERY[estimator]).gradient, first)
    assert not any(value.requires_grad for value in first.values())
    model.train()
    other = direction(estimator, model, seed=4, **EVERY[estimator]).gradient
    assert not torch.equal(first["0.weight"], other["0.weight"])
    model.eval()
    model[1].train()

    random.setstate(generators[0]), np.random.set_state(("MT19937", generators[1], 624)), torch.manual_seed(4)
    direction(estimator, model, seed=3, **EVERY[estimator])
    assert random.getstate() == generators[0]
    assert (np.random.get_state()[1] == generators[1]).all()
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert {n: (id(m), m.training, getattr(m, "mode", None)) for n, m in model.named_modules()} == modules
    for name, value in model.state_dict(keep_vars=True).items():
        assert (id(value), True) == (state[name][0], torch.equal(value, state[name][1])), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    pending.backward()  # the graph of a loss taken before is still valid


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "sine"}, "unknown straight-through estimator 'sine': did you mean 'sign'?"),
        ({"weighting": "efect"}, "unknown weighting of a straight-through estimator 'efect': did you mean 'effect'?"),
        ({"samples": 0}, "samples must be an integer >= 1, got 0"),
        ({"samples": True}, "samples must be an integer >= 1, got True"),
        ({"candidates": 1.5}, "candidates must be an integer >= 1, got 1.5"),
        ({"trial_step": 0}, "trial_step must be a number above 0, got 0"),
        ({"sigma": math.nan}, "sigma must be a number above 0, got nan"),
        ({"spread": math.inf}, "spread must be a number above 0, got inf"),
        ({"estimator": "sign", "samples": 2}, "samples must be 1 for sign, whose samples are equal, got 2"),
        ({"weighting": "best"}, "unknown weighting of a straight-through estimator 'best'"),
        ({"estimator": "proposal"}, "samples must be at least 2 for proposal"),
        ({"estimator": "nes", "weighting": "effect"}, "weighting must be uniform for nes"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        StraightThroughSettings(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "wrong", "message"),
    [
        (nn.Linear(6, 3), loss, "a straight-through estimator needs a model with BinaryActivation modules, got Linear"),
        (plain_net().requires_grad_(False), loss, "a direction needs a parameter with requires_grad"),
        (plain_net(), lambda m: m(X), r"loss(model) must return a scalar tensor, got shape (64, 3): take its mean"),
        (plain_net(), lambda m: float(loss(m)), "loss(model) must return a scalar tensor, got float"),
        (plain_net(), lambda m: loss(m).detach(), "the loss must depend on the model's parameters"),
    ],
)
def test_wrong_models_and_losses_are_refused(model: nn.Module, wrong: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        straight_through_direction(wrong, model, StraightThroughSettings(), seed=0)
    assert message in str(error.value)
