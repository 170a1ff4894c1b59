"""Quantization of tensors against slow loops over Python's own numbers, and against torch's fake quantization."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from trainables.compression.quantizers.quantized_modules import (
    dorefa_weight,
    linear_grid,
    on_grid,
    pact_activation,
    unit_activation,
    value_range,
    wrpn_weight,
)
from trainables.compression.schedule.configs import Mode

MODES: tuple[Mode, ...] = ("SYMMETRIC", "SYMMETRIC_RESTRICTED", "ASYMMETRIC_UNSIGNED", "ASYMMETRIC_SIGNED")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def linear_loop(values: Sequence[float], low: float, high: float, bits: int, mode: Mode) -> list[float]:
    """The formulas of the modes, one number at a time, by the q of Distiller: integers per unit."""
    if mode.startswith("SYMMETRIC"):
        most = max(abs(low), abs(high))
        restricted = mode == "SYMMETRIC_RESTRICTED"
        per_unit = (2 ** (bits - 1) - 1 if restricted else (2**bits - 1) / 2) / most
        least, greatest, zero = -(2 ** (bits - 1)) + restricted, 2 ** (bits - 1) - 1, 0
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        per_unit = (2**bits - 1) / (high - low)
        shift = 2 ** (bits - 1) if mode == "ASYMMETRIC_SIGNED" else 0
        least, greatest, zero = -shift, 2**bits - 1 - shift, round(-low * per_unit) - shift
    return [(min(max(round(v * per_unit) + zero, least), greatest) - zero) / per_unit for v in values]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dorefa_weights_are_those_of_the_formula(bits: int) -> None:
    w = normal(4, 7)
    peak = max(abs(math.tanh(v)) for v in w.flatten().tolist())
    steps = 2**bits - 1
    loop = [2 * (round(steps * (math.tanh(v) / (2 * peak) + 0.5)) / steps) - 1 for v in w.flatten().tolist()]
    assert dorefa_weight(w, bits).flatten().tolist() == pytest.approx(loop, abs=1e-12)


def test_one_bit_weights_are_signs_times_the_mean() -> None:
    values = [0.5, -1.5, 2.0, -0.25]
    mean = sum(abs(v) for v in values) / 4
    assert dorefa_weight(torch.tensor(values), 1).tolist() == pytest.approx([mean, -mean, mean, -mean])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_wrpn_weights_are_those_of_the_formula(bits: int) -> None:
    w = normal(5, 6)
    steps = 2 ** (bits - 1) - 1
    loop = [round(min(max(v, -1.0), 1.0) * steps) / steps for v in w.flatten().tolist()]
    assert wrpn_weight(w, bits).flatten().tolist() == pytest.approx(loop, abs=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_activations_are_clipped_and_rounded(bits: int) -> None:
    x = normal(40)
    steps = 2**bits - 1
    unit = [round(min(max(v, 0.0), 1.0) * steps) / steps for v in x.tolist()]
    assert unit_activation(x, bits).tolist() == pytest.approx(unit, abs=1e-12)
    learned = [round(min(max(v, 0.0), 1.3) * steps / 1.3) * 1.3 / steps for v in x.tolist()]
    alpha = torch.tensor(1.3, dtype=torch.float64)
    assert pact_activation(x, alpha, bits).tolist() == pytest.approx(learned, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_grids_are_those_of_torchs_fake_quantization(mode: Mode, bits: int) -> None:
    x = normal(200).float().requires_grad_()
    low, high = torch.tensor(-0.8), torch.tensor(1.2)
    grid = linear_grid(low, high, bits, mode)
    ours = on_grid(x, grid)
    theirs = torch.fake_quantize_per_tensor_affine(
        x, float(1 / grid.scale), int(grid.zero), quant_min=grid.q_min, quant_max=grid.q_max
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    weights = normal(200, seed=1).float()
    (of_ours,) = torch.autograd.grad((ours * weights).sum(), x)
    (of_theirs,) = torch.autograd.grad((theirs * weights).sum(), x)
    # At the rim torch cuts where the last integer's cell ends, here the range does; elsewhere they are one.
    inner = (x > -0.7) & (x < 0.75)
    assert inner.sum() > 50
    assert torch.equal(of_ours[inner], of_theirs[inner])
    assert torch.equal(of_ours, weights * ((x >= grid.low) & (x <= grid.high)))


@pytest.mark.parametrize("bits", [3, 8])
def test_single_precision_rounds_as_the_original_to_the_last_bit(bits: int) -> None:
    """Distiller f401db9 multiplies by n times 1 / range and divides by it again; a network amplifies what differs."""
    x = normal(4000).float() * 2
    values = x.numpy()
    low, high, steps = values.min(), values.max(), np.float32(2**bits - 1)
    scale = 1 / (high - low) * steps
    zero = np.round(scale * low)
    linear = (np.round(scale * values - zero) + zero) / scale
    got = on_grid(x, linear_grid(*value_range(x, None), bits, "ASYMMETRIC_UNSIGNED"))
    assert np.array_equal(got.numpy(), linear)
    alpha = np.float32(1.3)
    scale = 1 / alpha * steps
    pact = np.round(scale * np.minimum(np.maximum(values, 0), alpha)) / scale
    assert np.array_equal(pact_activation(x, torch.tensor(alpha), bits).numpy(), pact)


@pytest.mark.parametrize("mode", MODES)
def test_a_channel_has_the_grid_of_its_own_range(mode: Mode) -> None:
    w = normal(3, 4, 2, 2) * torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64).reshape(3, 1, 1, 1)
    for axis in (0, 1):
        got = on_grid(w, linear_grid(*value_range(w, axis), 4, mode))
        for channel in range(w.shape[axis]):
            values = w.select(axis, channel).flatten().tolist()
            low, high = min(values), max(values)
            ours, loop = got.select(axis, channel).flatten().tolist(), linear_loop(values, low, high, 4, mode)
            # The full symmetric range ends half-way between two integers: there either neighbour is right.
            inner = [i for i, v in enumerate(values) if mode != "SYMMETRIC" or abs(v) < max(-low, high)]
            assert len(inner) >= len(values) - 1
            assert [ours[i] for i in inner] == pytest.approx([loop[i] for i in inner], abs=1e-9)


def test_gradient_of_dorefa_weights_is_that_of_the_bent_weights() -> None:
    w = normal(9).requires_grad_()
    g = normal(9, seed=2)
    for bits in (2, 8):
        (got,) = torch.autograd.grad(dorefa_weight(w, bits), w, g)
        # f_i = t_i / |t_m| with t = tanh(w): df_i/dw_j = delta_ij (1 - t_j^2) / |t_m|, and through the maximum m
        # -t_i sign(t_m) (1 - t_m^2) / t_m^2.
        t = [math.tanh(v) for v in w.tolist()]
        m = max(range(9), key=lambda i: abs(t[i]))
        loop = [g[j].item() * (1 - t[j] ** 2) / abs(t[m]) for j in range(9)]
        through_peak = sum(g[i].item() * t[i] for i in range(9))
        loop[m] -= through_peak * math.copysign(1, t[m]) * (1 - t[m] ** 2) / t[m] ** 2
        assert got.tolist() == pytest.approx(loop, abs=1e-12)


def test_gradients_pass_straight_through_signs_and_inside_the_clips() -> None:
    w = torch.tensor([-1.5, -1.0, 0.0, 0.3, 1.0, 1.01], requires_grad=True)
    g = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert torch.autograd.grad(dorefa_weight(w, 1), w, g)[0].tolist() == g.tolist()
    assert torch.autograd.grad(wrpn_weight(w, 4), w, g)[0].tolist() == [0, 2, 3, 4, 5, 0]
    assert torch.autograd.grad(unit_activation(w, 4), w, g)[0].tolist() == [0, 0, 3, 4, 5, 0]


def test_gradients_of_the_learned_clip_are_those_of_its_paper() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.7], [1.5, 1.6, 9.0]], requires_grad=True)
    alpha = torch.tensor(1.5, requires_grad=True)
    g = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    of_x, of_alpha = torch.autograd.grad(pact_activation(x, alpha, 3), (x, alpha), g)
    assert of_x.tolist() == [[0, 2, 4], [0, 0, 0]]
    assert of_alpha.item() == 8 + 16 + 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay_and_half_precision_has_the_levels_of_single_precision(dtype: torch.dtype) -> None:
    x = normal(64).to(dtype)
    alpha = torch.tensor(1.5)
    functions = {
        "dorefa": lambda v: dorefa_weight(v, 4),
        "signs": lambda v: dorefa_weight(v, 1),
        "wrpn": lambda v: wrpn_weight(v, 4),
        "unit": lambda v: unit_activation(v, 4),
        "pact": lambda v: pact_activation(v, alpha, 4),
        "grid": lambda v: on_grid(v, linear_grid(*value_range(v, None), 12, "ASYMMETRIC_UNSIGNED")),
    }
    for name, function in functions.items():
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        assert y.dtype == dtype, name
        if dtype != torch.float64:
            assert torch.equal(y, function(x.float()).to(dtype)), name
        y.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype, name
