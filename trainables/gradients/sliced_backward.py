"""Backward passes of linear, convolution and batch-norm layers through some samples of a batch only.

Rows of a gradient that are zero stay zero through layers, activations, pooling, and norms of single samples, so the
products of the other rows give the whole gradient. A batch norm in train mode spreads every row's gradient over all
rows, through the batch's statistics. Here it takes the kept rows for its whole batch, as in a training on these samples
alone that is normalised by the whole batch's statistics: gradients stay orthogonal to shift and scale. (Dropping what
would reach the left-out rows breaks that: digits then learned little in the first third of a run.)

Shapes: B samples; K of them kept; inputs and outputs (B, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
#: Whether saved tensors go through hooks, as where activations are computed again in the backward pass.
_saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks


class SlicedBackward(TorchFunctionMode):
    """Forward passes inside the block are as always; their backward passes go through the rows `keep` alone.

    An input with B rows must have the samples in them: of layers that put time first, B must not be the length.
    Layers whose input has not B rows, and operations other than `F.linear`, `F.batch_norm` and convolutions with
    padding in numbers, are as always; so are those inside attention, recurrent layers, and gradient checkpoints, whose
    second forward pass torch runs outside of the block.

    Args:
        samples: B.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.keep: Tensor | None = None
        """(K,) int64, the rows that the backward pass goes through; None: all. Set it before they are reached."""
        self.spared_flops = 0
        """FLOPs of backward passes that were left out."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        if (func in _CONVOLUTIONS or func is F.linear) and not _saved_elsewhere(True):
            found = _read(func, args, given)
            if found is not None and found[0].dim() > 1 and found[1].dim() > 1 and len(found[0]) == self.samples:
                layer, weight, bias, options = found
                if torch.is_grad_enabled() and (layer.requires_grad or weight.requires_grad):
                    return _Sliced.apply(self, func, layer, weight, bias, options)
        if func is F.batch_norm and not _saved_elsewhere(True):
            norm = {**dict(zip(_NORM_NAMES, args, strict=False)), **given}
            if norm.get("training") and len(norm["input"]) == self.samples and torch.is_grad_enabled():
                return _SlicedNorm.apply(
                    self, norm["input"], norm.get("weight"), norm.get("bias"), norm["running_mean"],
                    norm["running_var"], norm.get("momentum", 0.1), norm.get("eps", 1e-5),
                )  # fmt: skip
        return func(*args, **given)


_CONVOLUTIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any, Any] | None:
    """Return input, weight, bias and a convolution's stride, padding, dilation, groups; None if it is not treated."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    layer, weight, bias = given["input"], given["weight"], given.get("bias")
    if func is F.linear:
        return layer, weight, bias, None
    dims = _CONVOLUTIONS[func]
    sizes = [given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1)]
    if isinstance(sizes[1], str) or layer.dim() != dims + 2:
        return None
    whole = [[size] * dims if isinstance(size, int) else list(size) for size in sizes]
    # One number may come in a tuple of its own.
    whole = [size * dims if len(size) == 1 else size for size in whole]
    return layer, weight, bias, (*whole, int(given.get("groups", 1)))


_NORM_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class _SlicedNorm(torch.autograd.Function):
    """A batch norm in train mode whose backward pass takes the kept rows for the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, mode: SlicedBackward, layer: Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float,
        eps: float,
    ) -> Tensor:  # fmt: skip
        result, batch_mean, batch_scale = torch.native_batch_norm(layer, weight, bias, mean, var, True, momentum, eps)
        ctx.save_for_backward(layer, weight, batch_mean, batch_scale)
        ctx.mode, ctx.eps = mode, eps
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        layer, weight, mean, scale = ctx.saved_tensors
        keep = ctx.mode.keep
        _, to_layer, to_weight, to_bias, *_ = ctx.needs_input_grad
        if keep is not None and len(keep) == 0:
            zero = None if weight is None else torch.zeros_like(weight)
            return None, torch.zeros_like(layer), zero, zero, None, None, None, None
        rows, inner = (layer, gradient) if keep is None else (layer[keep], gradient[keep])
        of_layer, of_weight, of_bias = _aten.native_batch_norm_backward(
            inner, rows, weight, None, None, mean, scale, True, ctx.eps, [to_layer, to_weight, to_bias]
        )
        if keep is not None and of_layer is not None:
            of_layer = torch.zeros_like(layer).index_copy_(0, keep, of_layer)
        return None, of_layer, of_weight, of_bias, None, None, None, None


class _Sliced(torch.autograd.Function):
    """A linear or convolution layer whose backward pass leaves out rows."""

    @staticmethod
    def forward(
        ctx: Any, mode: SlicedBackward, func: Any, layer: Tensor, weight: Tensor, bias: Tensor | None, options: Any
    ) -> Tensor:
        ctx.save_for_backward(layer, weight)
        ctx.mode, ctx.options = mode, options
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        result: Tensor = func(layer, weight, bias) if options is None else func(layer, weight, bias, *options)
        # Of sequences it is a view, which the activation that follows may not change in place.
        return _aten._unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        layer, weight = ctx.saved_tensors
        _, _, to_layer, to_weight, to_bias, _ = ctx.needs_input_grad
        keep = ctx.mode.keep
        rows = layer if keep is None else layer[keep]
        inner = gradient if keep is None else gradient[keep]
        left_out = len(layer) - len(rows)
        if left_out:
            one = 2 * prod(weight.shape) * prod(gradient.shape[2:] if ctx.options else gradient.shape[1:-1])
            ctx.mode.spared_flops += left_out * one * (to_layer + to_weight)
        rows, values = rows.to(inner.dtype), weight.to(inner.dtype)
        of_layer = of_weight = of_bias = None
        if len(rows) == 0:
            of_layer = torch.zeros_like(layer) if to_layer else None
            of_weight = torch.zeros_like(weight) if to_weight else None
            of_bias = torch.zeros(ctx.bias_sizes, dtype=weight.dtype, device=weight.device) if to_bias else None
            return None, None, of_layer, of_weight, of_bias, None
        if ctx.options is None:
            flat, inputs = inner.flatten(0, -2), rows.flatten(0, -2)
            of_layer = (flat @ values).view(*inner.shape[:-1], -1) if to_layer else None
            of_weight = flat.t() @ inputs if to_weight else None
            of_bias = flat.sum(0) if to_bias else None
        else:
            stride, padding, dilation, groups = ctx.options
            of_layer, of_weight, of_bias = _aten.convolution_backward(
                inner, rows, values, ctx.bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups,
                [to_layer, to_weight, to_bias],
            )  # fmt: skip
        if of_layer is not None:
            of_layer = of_layer.to(layer.dtype)
            if keep is not None:
                of_layer = torch.zeros_like(layer).index_copy_(0, keep, of_layer)
        return (
            None, None, of_layer, None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype), None,
        )  # fmt: skip
