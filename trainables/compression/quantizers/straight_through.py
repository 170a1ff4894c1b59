"""Straight-through estimators: gradients pass through rounding as if the value had not been rounded.

Shapes: x and y have any, the same, shape; alpha ().
Symbols: y the quantized x; alpha a learned clip; k bits; g the gradient of y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, quantize: Callable[[Tensor], Tensor], inside: Tensor | None) -> Tensor:
        # The result is a new tensor, not a view: later operations may write into it (in-place dropout, +=).
        return quantize(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradients[0] if inside is None else gradients[0] * inside, None, None


def straight_through(x: Tensor, quantize: Callable[[Tensor], Tensor], inside: Tensor | None = None) -> Tensor:
    """Return quantize(x), with the gradient of x (Bengio et al. 2013, section 4).

    Args:
        x: any shape, real.
        quantize: returns a new tensor of the same shape and dtype; not differentiated.
        inside: booleans of the same shape; where false the gradient is 0. None: it passes everywhere.
    """
    y: Tensor = _StraightThrough.apply(x, quantize, inside)
    return y


class _LearnedClip(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, alpha: Tensor, quantize: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return quantize(x, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, alpha, _ = inputs
        ctx.save_for_backward((x >= 0) & (x < alpha), x >= alpha, alpha)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inside, above, alpha = ctx.saved_tensors
        return gradients[0] * inside, (gradients[0] * above).sum(dtype=alpha.dtype), None


def learned_clip(x: Tensor, alpha: Tensor, quantize: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return quantize(x, alpha) with the gradients of PACT (Choi et al. 2018, eq. 3).

    The gradient of x is g in [0, alpha), else 0; the gradient of alpha is the sum of g where x >= alpha.

    Args:
        x: any shape, real.
        alpha: scalar.
        quantize: returns a new tensor of x's shape and dtype; not differentiated.
    """
    y: Tensor = _LearnedClip.apply(x, alpha, quantize)
    return y
