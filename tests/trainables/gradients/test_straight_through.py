"""Straight-through activations against closed forms, hard tanh, and the laws of what they draw."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from trainables.errors import UserError
from trainables.gradients import (
    BinaryActivation,
    activation_mode,
    backward_noise_ste,
    sign_ste,
    stochastic_rounding_ste,
)

DRAWS = 40_000
POINTS = torch.tensor([-2.5, -1.0, -0.7, -0.2, 0.0, 0.3, 0.9, 1.0, 1.6])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slope(function: Callable[[Tensor], Tensor], x: Tensor, above: Tensor | float = 1.0) -> Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad((function(leaf) * above).sum(), leaf)
    return found


def close(frequency: Tensor, probability: Tensor) -> bool:
    """Whether frequencies of `DRAWS` lie within five deviations of the binomial's mean."""
    deviation = (probability * (1 - probability) / DRAWS).sqrt()
    return bool(((frequency - probability).abs() <= 5 * deviation).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_is_the_sign_with_one_at_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -3.0, -1e-30, -0.0, 0.0, 1e-30, 2.0, math.inf], dtype=dtype)
    for function in (sign_ste, backward_noise_ste):
        found = function(x)
        assert found.dtype == dtype
        assert found.tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    assert all(function(torch.tensor([math.nan])).isnan() for function in (sign_ste, stochastic_rounding_ste))


def test_the_window_is_closed_and_that_of_hard_tanh() -> None:
    above = torch.randn(len(POINTS), generator=generator())
    window = (POINTS.abs() <= 1).float()
    assert torch.equal(slope(sign_ste, POINTS, above), above * window)
    assert torch.equal(slope(stochastic_rounding_ste, POINTS, above), above * window)
    inside = torch.randn(500, generator=generator(1))  # hard tanh's own window is open, which random points never meet
    assert torch.equal(slope(sign_ste, inside), slope(F.hardtanh, inside))


def test_stochastic_rounding_has_its_probabilities() -> None:
    drawn = stochastic_rounding_ste(POINTS.expand(DRAWS, -1), generator())
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert close((drawn > 0).double().mean(0), ((POINTS.double() + 1) / 2).clamp(0, 1))


def test_backward_noise_is_the_smoothed_window_over_the_plain_sign() -> None:
    x = POINTS.expand(DRAWS, -1)
    found = slope(lambda leaf: backward_noise_ste(leaf, generator()), x)
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert close(found.double().mean(0), (1 - POINTS.double().abs() / 2).clamp(0, 1))
    assert torch.equal(backward_noise_ste(x, generator()), sign_ste(x))
    # It is the plain estimator's window at the value whose sign stochastic rounding takes: the same draw.
    dithered = x + (2 * torch.rand(x.shape, generator=generator()) - 1)
    assert torch.equal(found, slope(sign_ste, dithered))
    assert torch.equal(stochastic_rounding_ste(x, generator()), sign_ste(dithered))


def test_vmap_equals_the_loop() -> None:
    weights = torch.randn(5, 7, 3, generator=generator())
    x = torch.randn(11, 7, generator=generator(1))

    def loss(weight: Tensor) -> Tensor:
        return (sign_ste(sign_ste(x @ weight) @ weight.T) * x).square().mean()

    values, slopes = vmap(loss)(weights), vmap(grad(loss))(weights)
    for weight, value, found in zip(weights, values, slopes, strict=True):
        torch.testing.assert_close(loss(weight), value)
        torch.testing.assert_close(slope(loss, weight), found)


def test_vmap_draws_one_sample_for_each_or_one_for_all() -> None:
    rows = torch.zeros(4, 60)

    def rounded(row: Tensor) -> Tensor:
        return stochastic_rounding_ste(row, own)

    own = generator(5)
    assert torch.equal(vmap(rounded, randomness="different")(rows), stochastic_rounding_ste(rows, generator(5)))
    own = generator(5)
    same = vmap(grad(lambda row: (rounded(row) * row).sum()), randomness="same")(rows)
    assert torch.equal(same, stochastic_rounding_ste(rows[0], generator(5)).expand(4, -1))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(rounded)(rows)


@pytest.mark.parametrize("mode", ["sign", "stochastic", "backward"])
def test_a_module_is_its_function_in_train_mode_and_the_sign_in_eval_mode(mode: str) -> None:
    functions = {"sign": sign_ste, "stochastic": stochastic_rounding_ste, "backward": backward_noise_ste}
    x = torch.randn(30, 30, generator=generator())
    module = BinaryActivation(mode)
    assert (repr(module), len(module.state_dict())) == (f"BinaryActivation(mode={mode!r})", 0)
    torch.manual_seed(1)
    expected, expected_slope = functions[mode](x), slope(functions[mode], x)
    torch.manual_seed(1)
    assert torch.equal(module(x), expected)
    assert torch.equal(slope(copy.deepcopy(pickle.loads(pickle.dumps(module))), x), expected_slope)
    module.eval()
    assert torch.equal(module(x), sign_ste(x))
    assert torch.equal(slope(module, x), slope(sign_ste, x))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown mode of a BinaryActivation 'sgn': did you mean 'sign'\? Valid: "):
        BinaryActivation("sgn")
    with pytest.raises(UserError, match="unknown mode"):
        activation_mode(BinaryActivation(), "noise").__enter__()
    with pytest.raises(UserError, match="needs a model with BinaryActivation modules, got Linear without: build it"):
        activation_mode(nn.Linear(2, 2), "sign").__enter__()
