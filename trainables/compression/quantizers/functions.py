"""Pure functions that quantize a tensor to values on a grid, with the same shape and dtype.

Shapes: w a weight, x activations, both any; ranges and grids () or, per channel, of a shape that broadcasts to w.
Symbols: k bits; n = 2^k - 1 steps between 2^k levels; Q_k(r) = round(n r) / n for r in [0, 1]; s step; z zero point.

Rounding is to the nearest, ties to even. Half precision is computed in single precision and rounded at the end. A
weight that is exactly 0 stays exactly 0 in every scheme, so that pruned weights stay pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.compression.schedule.configs import Mode


def wide(x: Tensor) -> Tensor:
    """Return x in at least single precision, because half precision cannot represent all integers of a grid."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def unit_levels(r: Tensor, bits: int) -> Tensor:
    """Return Q_k(r): round r in [0, 1] to the nearest of 2^k equally spaced levels (DoReFa-Net, eq. 5)."""
    steps = 2**bits - 1
    return (r * steps).round_().div_(steps)


def dorefa_weight(w: Tensor, bits: int) -> Tensor:
    """Return DoReFa-Net weights (Zhou et al. 2016, eqs. 7 and 9), in [-1, 1].

    k > 1: 2 Q_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1; the gradient is that of tanh(w) / max|tanh(w)|, including the
    gradient of the maximum. These levels do not include zero; a weight that is exactly 0 stays 0, an additional value.
    k = 1: sign(w) E|w|, gradient 1; E is over the nonzero weights, which are all weights without pruning.
    """
    if bits == 1:

        def signs(w: Tensor) -> Tensor:
            values = wide(w)
            mean = values.abs().sum() / torch.count_nonzero(values).clamp(min=1)
            return (torch.sign(values) * mean).to(w.dtype)

        return straight_through(w, signs)
    bent = torch.tanh(wide(w))
    peak = bent.abs().amax()
    even = bent / (peak + (peak == 0))  # all zeros stay zeros, with finite gradients
    levels = straight_through(even, lambda e: torch.where(e == 0, 0, 2 * unit_levels(e / 2 + 0.5, bits) - 1))
    return levels.to(w.dtype)


def wrpn_weight(w: Tensor, bits: int) -> Tensor:
    """Return WRPN weights (Mishra et al. 2017, section 4): w clamped to [-1, 1], round(m w) / m, m = 2^(k-1) - 1.

    k >= 2: one bit is the sign bit. The gradient is 1 in [-1, 1], else 0.
    """
    steps = 2 ** (bits - 1) - 1
    return straight_through(
        w, lambda w: (torch.round(wide(w).clamp(-1, 1) * steps) / steps).to(w.dtype), w.detach().abs() <= 1
    )


def unit_activation(x: Tensor, bits: int) -> Tensor:
    """Return Q_k(clip(x, 0, 1)) (DoReFa-Net, section 2.6; WRPN, section 4). The gradient is 1 in [0, 1], else 0."""
    inside = (x.detach() >= 0) & (x.detach() <= 1)
    return straight_through(x, lambda x: unit_levels(wide(x).clamp(0, 1), bits).to(x.dtype), inside)


def pact_activation(x: Tensor, alpha: Tensor, bits: int) -> Tensor:
    """Return Q_k(clip(x, 0, alpha) / alpha) alpha, gradients of PACT (Choi et al. 2018, eqs. 1 to 3).

    alpha is a scalar, at least the smallest normal number. With g the gradient of the result, that of x is g in
    [0, alpha), else 0; that of alpha is the sum of g where x >= alpha.
    """
    y: Tensor = _LearnedClip.apply(x, alpha, bits)
    return y


class Grid(NamedTuple):
    """A grid of 2^k integers q with the values (q - zero) / scale."""

    scale: Tensor
    """1 / s > 0, by which values are multiplied as in Distiller, whose rounding is then equal to the last bit."""
    zero: Tensor
    """z, an integer: the q of value 0.0."""
    q_min: int
    q_max: int
    low: Tensor
    """Lower end of the range; values below it have gradient 0."""
    high: Tensor
    """Upper end of the range; values above it have gradient 0."""


def linear_grid(low: Tensor, high: Tensor, bits: int, mode: Mode) -> Grid:
    """Return the grid for a range (Krishnamoorthi 2018, section 2; Distiller's modes). It always includes 0.

    SYMMETRIC: M = max(|low|, |high|), s = M / ((2^k - 1) / 2), z = 0, q in [-2^(k-1), 2^(k-1) - 1].
    SYMMETRIC_RESTRICTED: s = M / (2^(k-1) - 1), z = 0, q in [-(2^(k-1) - 1), 2^(k-1) - 1].
    ASYMMETRIC_UNSIGNED: low and high extended to include 0, s = (high - low) / (2^k - 1), z = round(-low / s),
    q in [0, 2^k - 1].
    ASYMMETRIC_SIGNED: the same with 2^(k-1) subtracted from z and q; the represented values are the same.
    A range of width 0 has s = 1. ``low`` <= ``high`` are () or one per channel; k is at least 2 if symmetric.
    """
    low, high = wide(low), wide(high)
    if mode.startswith("SYMMETRIC"):
        high = torch.maximum(low.abs(), high.abs())
        low = -high
        q_max = 2 ** (bits - 1) - 1
        q_min, half = (-q_max, float(q_max)) if mode == "SYMMETRIC_RESTRICTED" else (-q_max - 1, (2**bits - 1) / 2)
        scale = torch.where(high == 0, 1, half / high)
        return Grid(scale, torch.zeros_like(scale), q_min, q_max, low, high)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = torch.where(high == low, 1, (2**bits - 1) / (high - low))
    q_min = -(2 ** (bits - 1)) if mode == "ASYMMETRIC_SIGNED" else 0
    return Grid(scale, torch.round(-low * scale) + q_min, q_min, q_min + 2**bits - 1, low, high)


def on_grid(x: Tensor, grid: Grid) -> Tensor:
    """Return (clamp(round(x / s) + z, q_min, q_max) - z) s; the gradient is 1 in the grid's range, else 0."""

    def levels(x: Tensor) -> Tensor:
        # In place after the first new tensor: activations are large, and each extra copy costs time.
        q = (wide(x) * grid.scale).add_(grid.zero).round_().clamp_(grid.q_min, grid.q_max)
        return q.sub_(grid.zero).div_(grid.scale).to(x.dtype)

    values = wide(x.detach())
    return straight_through(x, levels, (values >= grid.low) & (values <= grid.high))


def value_range(w: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return the least and greatest value of w: () or, per slice along an axis, of a shape that broadcasts to w."""
    if axis is None:
        low, high = torch.aminmax(w)
        return low, high
    others = [d for d in range(w.dim()) if d != axis]
    return w.amin(others, keepdim=True), w.amax(others, keepdim=True)


# --- Straight-through estimators: gradients pass through rounding as if the value had not been rounded ----------------
# Results are new tensors, not views: later operations may write into them. Contexts are set up apart from the forward
# pass, which `torch.func` asks for.


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, quantize: Callable[[Tensor], Tensor], inside: Tensor | None) -> Tensor:
        return quantize(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradients[0] if inside is None else gradients[0] * inside, None, None


def straight_through(x: Tensor, quantize: Callable[[Tensor], Tensor], inside: Tensor | None = None) -> Tensor:
    """Return quantize(x), a new tensor like x, with the gradient of x (Bengio et al. 2013, section 4).

    Where ``inside``, booleans of x's shape, is false, the gradient is 0; None: it passes everywhere.
    """
    y: Tensor = _StraightThrough.apply(x, quantize, inside)
    return y


class _LearnedClip(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, alpha: Tensor, bits: int) -> Tensor:
        values = wide(x)
        clip = alpha.to(values.dtype).clamp(min=torch.finfo(values.dtype).tiny)
        scale = ((2**bits - 1) / clip).clamp(max=torch.finfo(values.dtype).max)
        return (values.clamp(min=0).minimum(clip) * scale).round_().div_(scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, alpha, _ = inputs
        ctx.save_for_backward((x >= 0) & (x < alpha), x >= alpha, alpha)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inside, above, alpha = ctx.saved_tensors
        return gradients[0] * inside, (gradients[0] * above).sum(dtype=alpha.dtype), None
