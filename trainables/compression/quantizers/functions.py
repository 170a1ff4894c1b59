"""Quantization as pure functions: values in, values on a grid out, of the same shape and dtype.

Shapes: w a weight, x activations, both any; ranges and grids () or, a channel each, of a shape that broadcasts to w.
Symbols: k bits; n = 2^k - 1 steps between 2^k levels; Q_k(r) = round(n r) / n for r in [0, 1]; s step; z zero point.

Rounding is to the nearest, ties to the even one. Half precision is computed in single precision and rounded at the
end. A weight that is exactly 0 stays exactly 0 in every scheme, so that what a pruner zeroed stays pruned.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trainables.compression.quantizers.straight_through import learned_clip, straight_through

Mode = Literal["SYMMETRIC", "SYMMETRIC_RESTRICTED", "ASYMMETRIC_UNSIGNED", "ASYMMETRIC_SIGNED"]


def wide(x: Tensor) -> Tensor:
    """x in single precision at least: half precision has no room for the integers of a grid."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def unit_levels(r: Tensor, bits: int) -> Tensor:
    """Q_k(r): r in [0, 1] to the nearest of 2^k equally spaced levels (DoReFa-Net, eq. 5)."""
    steps = 2**bits - 1
    return (r * steps).round_().div_(steps)


def dorefa_weight(w: Tensor, bits: int) -> Tensor:
    """DoReFa-Net weights (Zhou et al. 2016, eqs. 7 and 9), in [-1, 1].

    k > 1: 2 Q_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1; the gradient is that of tanh(w) / max|tanh(w)|, the maximum's
    own included. These levels have no zero: a weight that is exactly 0 is 0 all the same, an additional value.
    k = 1: sign(w) E|w|, gradient 1; E is over the weights that are not 0, which without pruning are all of them.
    """
    if bits == 1:
        return straight_through(w, _signs)
    bent = torch.tanh(wide(w))
    peak = bent.abs().amax()
    even = bent / (peak + (peak == 0))  # all zeros stay zeros, with finite gradients
    levels = straight_through(even, lambda e: torch.where(e == 0, 0, 2 * unit_levels(e / 2 + 0.5, bits) - 1))
    return levels.to(w.dtype)


def _signs(w: Tensor) -> Tensor:
    """sign(w) times the mean of |w| over what is not 0."""
    values = wide(w)
    mean = values.abs().sum() / torch.count_nonzero(values).clamp(min=1)
    return (torch.sign(values) * mean).to(w.dtype)


def wrpn_weight(w: Tensor, bits: int) -> Tensor:
    """WRPN weights (Mishra et al. 2017, section 4): w clamped to [-1, 1], round(m w) / m with m = 2^(k-1) - 1.

    k >= 2: one bit is the sign's. The gradient is 1 in [-1, 1], else 0.
    """
    steps = 2 ** (bits - 1) - 1

    def levels(w: Tensor) -> Tensor:
        return (torch.round(wide(w).clamp(-1, 1) * steps) / steps).to(w.dtype)

    return straight_through(w, levels, w.detach().abs() <= 1)


def unit_activation(x: Tensor, bits: int) -> Tensor:
    """Q_k(clip(x, 0, 1)) (DoReFa-Net, section 2.6; WRPN, section 4). The gradient is 1 in [0, 1], else 0."""

    def levels(x: Tensor) -> Tensor:
        return unit_levels(wide(x).clamp(0, 1), bits).to(x.dtype)

    return straight_through(x, levels, (x.detach() >= 0) & (x.detach() <= 1))


def pact_activation(x: Tensor, alpha: Tensor, bits: int) -> Tensor:
    """Q_k(clip(x, 0, alpha) / alpha) alpha (Choi et al. 2018, eqs. 1 to 3), gradients as in `learned_clip`.

    Args:
        x: any shape.
        alpha: scalar; below the smallest normal number it counts as that.
        bits: k >= 1.
    """

    def levels(x: Tensor, alpha: Tensor) -> Tensor:
        values = wide(x)
        clip = alpha.to(values.dtype).clamp(min=torch.finfo(values.dtype).tiny)
        return (unit_levels(values.clamp(min=0).minimum(clip) / clip, bits) * clip).to(x.dtype)

    return learned_clip(x, alpha, levels)


def least_linear_bits(mode: Mode) -> int:
    """Fewest bits of a grid: with one bit a symmetric one has nothing but 0."""
    return 2 if mode in ("SYMMETRIC", "SYMMETRIC_RESTRICTED") else 1


class Grid(NamedTuple):
    """2^k integers q and what they stand for: (q - zero) step."""

    step: Tensor
    """s > 0."""
    zero: Tensor
    """z, an integer: what 0.0 becomes."""
    q_min: int
    q_max: int
    low: Tensor
    """Where the range begins; gradients of what is below are 0."""
    high: Tensor
    """Where it ends."""


def linear_grid(low: Tensor, high: Tensor, bits: int, mode: Mode) -> Grid:
    """The grid for a range (Krishnamoorthi 2018, section 2; Distiller's modes). 0 is always on it.

    SYMMETRIC: M = max(|low|, |high|), s = M / ((2^k - 1) / 2), z = 0, q in [-2^(k-1), 2^(k-1) - 1].
    SYMMETRIC_RESTRICTED: s = M / (2^(k-1) - 1), z = 0, q in [-(2^(k-1) - 1), 2^(k-1) - 1].
    ASYMMETRIC_UNSIGNED: low and high made to include 0, s = (high - low) / (2^k - 1), z = round(-low / s),
    q in [0, 2^k - 1].
    ASYMMETRIC_SIGNED: the same less 2^(k-1), in z and in q; it stands for the same values.
    A range of width 0 has s = 1.

    Args:
        low, high: () or one a channel; low <= high.
        bits: k; at least 2 where symmetric.
        mode: see above.
    """
    low, high = wide(low), wide(high)
    if mode in ("SYMMETRIC", "SYMMETRIC_RESTRICTED"):
        high = torch.maximum(low.abs(), high.abs())
        low = -high
        q_max = 2 ** (bits - 1) - 1
        q_min, half = (-q_max, float(q_max)) if mode == "SYMMETRIC_RESTRICTED" else (-q_max - 1, (2**bits - 1) / 2)
        step = high / half
        step = step + (step == 0)
        return Grid(step, torch.zeros_like(step), q_min, q_max, low, high)
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = (high - low) / (2**bits - 1)
    step = step + (step == 0)
    q_min = -(2 ** (bits - 1)) if mode == "ASYMMETRIC_SIGNED" else 0
    return Grid(step, torch.round(-low / step) + q_min, q_min, q_min + 2**bits - 1, low, high)


def on_grid(x: Tensor, grid: Grid) -> Tensor:
    """(clamp(round(x / s) + z, q_min, q_max) - z) s; the gradient is 1 in the grid's range, else 0."""

    def levels(x: Tensor) -> Tensor:
        # In place from the first new tensor on: activations are large, and each pass over them counts.
        q = (wide(x) / grid.step).round_().add_(grid.zero).clamp_(grid.q_min, grid.q_max)
        return q.sub_(grid.zero).mul_(grid.step).to(x.dtype)

    values = wide(x.detach())
    return straight_through(x, levels, (values >= grid.low) & (values <= grid.high))


def value_range(w: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Least and greatest value of w: () or, of each slice along an axis, shaped to broadcast to w."""
    if axis is None:
        low, high = torch.aminmax(w)
        return low, high
    others = [d for d in range(w.dim()) if d != axis]
    return w.amin(others, keepdim=True), w.amax(others, keepdim=True)
