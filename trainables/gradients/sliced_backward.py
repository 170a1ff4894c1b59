"""Backward passes of linear, convolution and batch-norm layers through some samples of a batch only.

Rows of a gradient that are zero stay zero through layers, activations, pooling, and norms of single samples, so the
products of the other rows give the whole gradient. A batch norm in train mode spreads every row's gradient over all
rows, through the batch's statistics. Here it takes the kept rows for its whole batch, as in a training on these samples
alone that is normalised by the whole batch's statistics: gradients stay orthogonal to shift and scale. (Dropping what
would reach the left-out rows breaks that: digits then learned little in the first third of a run.)

That a layer's rows are those of the samples is proven, not taken for granted: the gradient that reaches the layer must
be zero in the rows that are left out. A layer of other rows (time first with as many steps as samples, rows that were
sorted or mixed) fails, and its backward pass runs whole, from the first time on.

Shapes: B samples; K of them kept; inputs and outputs (B, ...).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainables.errors import UserError
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.layer_signals import LayerSignals, rows_of_others
from trainables.gradients.output_rows import OutputRows
from trainables.workloads.batch_shapes import shapes_of

# --- Proof that the rows of layers are the samples of a batch, for methods that read samples' gradients in layers -----
# A pass in which the loss of half of the samples counts nothing must leave their rows without a gradient in each layer.
#
# Shapes: B samples.

#: Iterations from one proof to the next: it costs a pass.
PROVE_EVERY = 1000


def layers_of_samples(method: GradientMethod, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers whose rows are the samples of the method's next draw, and warn of the others.

    Norms are looked at in evaluation mode, since in training they depend on the whole batch.

    Raises:
        UserError: there is no such layer.
    """
    draw = method.draw(method.generator())
    if draw.size < 2 or not layers:
        return dict(layers)
    weights = torch.arange(draw.size, device=method.device).remainder(2).to(torch.float32)
    modes = [(module, module.training) for module in method.model.modules()]
    method.model.eval()
    try:
        key = ("rows", shapes_of(draw.batch))
        with (
            method.pass_on(draw) as evaluate,
            OutputRows(method.model, draw.size, lambda _: weights),
            LayerSignals(layers) as recorded,
        ):
            with method.meter.forward(key):
                loss = evaluate({})
            with method.meter.backward(key):
                torch.autograd.grad(loss, recorded.edges, allow_unused=True)
            left_out = weights == 0
            others = {
                name
                for name in layers
                for _, gradient in recorded.calls(name)
                if len(gradient) == draw.size and bool(gradient[left_out].any())
            }
    finally:
        for module, mode in modes:
            module.training = mode
    if others == layers.keys():
        raise UserError(
            f"samples' gradients cannot be read in the layers: {rows_of_others(layers)}. Put the samples' dimension "
            "first (batch_first=True), or use another method"
        )
    if others:
        warnings.warn(f"{rows_of_others(sorted(others))}: they are not looked at", stacklevel=4)
    return {name: layer for name, layer in layers.items() if name not in others}


# --- Backward passes of linear, convolution and batch-norm layers through some samples of a batch only ----------------

#: Passes of a layer with a proof at first, since one may succeed by chance, and from one to the next after them: it
#: reads the gradient, and the device is waited for.
FIRST_PROOFS, PROOF_EVERY = 8, 16

_aten = torch.ops.aten
#: Whether saved tensors go through hooks, as where activations are computed again in the backward pass.
_saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks


class SlicedLayers:
    """Layers of a model, and those that failed the proof that their rows are those of the samples.

    Args:
        model: names its layers; None for none.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names: dict[int, str] = {}
        if model is not None:
            tensors = (*model.named_parameters(), *model.named_buffers())
            self._names = {id(tensor): name.rpartition(".")[0] or "the model" for name, tensor in tensors}
        self.whole: dict[str, bool] = {}
        """Layers that run whole, and whether a warning has said so."""
        self.passes: dict[str, int] = {}
        """Backward passes so far that left out rows, by layer."""

    def name_of(self, *tensors: Tensor | None) -> str:
        """Return the name of the layer that has one of these tensors, or words for it."""
        found = (self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names)
        shape = next(tuple(tensor.shape) for tensor in tensors if tensor is not None)
        return next(found, f"a layer with weights {shape}")

    def warn(self) -> None:
        """Name the layers that have failed since the last call."""
        new = [name for name, said in self.whole.items() if not said]
        self.whole.update(dict.fromkeys(new, True))
        if new:
            warnings.warn(
                f"{rows_of_others(new)}, so the backward pass leaves nothing out there and saves nothing: put the "
                "samples' dimension first (batch_first=True) where it is another",
                stacklevel=4,
            )


class SlicedBackward(TorchFunctionMode):
    """Forward passes inside the block are as always; their backward passes go through the rows `keep` alone.

    Layers whose input has not B rows, and operations other than `F.linear`, `F.batch_norm` and convolutions with
    padding in numbers, are as always; so are those inside attention, recurrent layers, and gradient checkpoints, whose
    second forward pass torch runs outside of the block.

    Args:
        samples: B.
        layers: those that have failed the proof, which is made in a layer's first passes and every `PROOF_EVERY`.
    """

    def __init__(self, samples: int, layers: SlicedLayers | None = None) -> None:
        super().__init__()
        self.samples = samples
        self.layers = SlicedLayers() if layers is None else layers
        self.keep: Tensor | None = None
        """(K,) int64, the rows that the backward pass goes through; None: all. Set it before they are reached."""
        self.spared_flops = 0
        """FLOPs of backward passes that were left out."""

    def kept_rows(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return the rows (K,) through which a layer's backward pass goes, given its output's gradient; None: all."""
        if self.keep is None or name in self.layers.whole:
            return None
        passes = self.layers.passes[name] = self.layers.passes.get(name, 0) + 1
        if passes <= FIRST_PROOFS or passes % PROOF_EVERY == 0:
            left_out = torch.ones(self.samples, dtype=torch.bool, device=gradient.device)
            left_out[self.keep] = False
            if bool(gradient[left_out].any()):
                self.layers.whole[name] = False
                return None
        return self.keep

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
        ctx.mode, ctx.eps, ctx.layer = mode, eps, mode.layers.name_of(weight, mean, layer)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        layer, weight, mean, scale = ctx.saved_tensors
        keep = ctx.mode.kept_rows(ctx.layer, gradient)
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
        ctx.mode, ctx.options, ctx.layer = mode, options, mode.layers.name_of(weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        result: Tensor = func(layer, weight, bias) if options is None else func(layer, weight, bias, *options)
        # Of sequences it is a view, which the activation that follows may not change in place.
        return _aten._unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        layer, weight = ctx.saved_tensors
        _, _, to_layer, to_weight, to_bias, _ = ctx.needs_input_grad
        keep = ctx.mode.kept_rows(ctx.layer, gradient)
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
