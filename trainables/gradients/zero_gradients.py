"""Zero gradients: samples whose loss gradient is nearly zero take no part in the backward pass.

Every sample runs forward. Rows of a gradient that are zero stay zero through layers, activations, pooling, and norms of
single samples, so the products of the other rows give the whole gradient. A batch norm in train mode spreads every
row's gradient over all rows; here it takes the kept rows for its whole batch, so that gradients stay orthogonal to
shift and scale. (Dropping what would reach the left-out rows breaks that: digits then learned little in the first third
of a run.)

That a layer's rows are those of the samples is proven: the gradient that reaches the layer must be zero in the rows
that are left out. A layer of other rows (time first, rows that were sorted or mixed) runs whole from then on.

Shapes: B samples; K of them kept; inputs and outputs (B, ...); norms, weights (B,).
Symbols: n_i norm of the gradient of sample i's loss with respect to the model's output (cross entropy: the distance
between probabilities and label, in [0, sqrt(2)]).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainables.gradients.gradient_method import Draw, GradientMethod, check_option
from trainables.gradients.layer_calls import CONVOLUTIONS, convolution_sizes, named_arguments
from trainables.gradients.output_rows import OutputRows, row_norms

#: Passes of a layer with a proof at first, since one may succeed by chance, and from one to the next after them: it
#: reads the gradient, and the device is waited for.
FIRST_PROOFS, PROOF_EVERY = 8, 16

_aten = torch.ops.aten
#: True if saved tensors go through hooks, as where activations are computed again in the backward pass.
_saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks


class SlicedLayers:
    """Layers of a model, and those that failed the proof that their rows are those of the samples."""

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name.rpartition(".")[0] or "the model" for name, tensor in tensors}
        self.whole: dict[str, bool] = {}  # layers that run whole, and whether a warning has said so
        self.passes: dict[str, int] = {}  # backward passes so far that left out rows, by layer

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
            names = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            warnings.warn(
                f"the rows of {names} are not those of the batch's samples, or depend on other samples, so the "
                "backward pass leaves nothing out there and saves nothing: put the samples' dimension first "
                "(batch_first=True) where it is another",
                stacklevel=4,
            )


class SlicedBackward(TorchFunctionMode):
    """Forward passes inside the block are as always; their backward passes go through the rows `keep` alone.

    Layers whose input has not ``samples`` rows, and operations other than `F.linear`, `F.batch_norm` and convolutions
    with padding in numbers, are as always; so are those inside attention, recurrent layers, and gradient checkpoints,
    whose second forward pass torch runs outside of the block.
    """

    def __init__(self, samples: int, layers: SlicedLayers) -> None:
        super().__init__()
        self.samples, self.layers = samples, layers
        self.keep: Tensor | None = None
        """(K,) int64, the rows that the backward pass goes through; None: all. Set it before they are reached."""
        self.spared_flops = 0  # FLOPs of backward passes that were left out

    def kept(self, name: str, layer: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the rows (K,) through which a layer's backward pass goes, None for all, and both tensors there.

        The layer's input and the gradient of its output are (B, ...).
        """
        keep = self.keep
        if keep is not None and name not in self.layers.whole:
            passes = self.layers.passes[name] = self.layers.passes.get(name, 0) + 1
            if passes <= FIRST_PROOFS or passes % PROOF_EVERY == 0:
                left_out = torch.ones(self.samples, dtype=torch.bool, device=gradient.device)
                left_out[keep] = False
                if bool(gradient[left_out].any()):
                    self.layers.whole[name] = False
        if keep is None or name in self.layers.whole:
            return None, layer, gradient
        return keep, layer[keep], gradient[keep]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = named_arguments(func, args, kwargs)
        if call and torch.is_grad_enabled() and not _saved_elsewhere(True) and len(call["input"]) == self.samples:
            layer, weight, bias = call["input"], call.get("weight"), call.get("bias")
            if func is F.batch_norm:
                if call.get("training"):
                    return _SlicedNorm.apply(
                        self, layer, weight, bias, call["running_mean"], call["running_var"], call.get("momentum", 0.1),
                        call.get("eps", 1e-5),
                    )  # fmt: skip
            elif layer.dim() > 1 and weight.dim() > 1 and (layer.requires_grad or weight.requires_grad):
                sizes = convolution_sizes(func, call) if func in CONVOLUTIONS else None
                if func is F.linear or sizes is not None:
                    return _Sliced.apply(self, func, layer, weight, bias, sizes)
        return func(*args, **(kwargs or {}))


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
        layer, weight, mean, scale = ctx.saved_tensors
        keep, rows, inner = ctx.mode.kept(ctx.layer, layer, gradients[0])
        needed = list(ctx.needs_input_grad[1:4])
        if len(rows) == 0:
            zero = None if weight is None else torch.zeros_like(weight)
            return None, torch.zeros_like(layer), zero, zero, None, None, None, None
        of_layer, of_weight, of_bias = _aten.native_batch_norm_backward(
            inner, rows, weight, None, None, mean, scale, True, ctx.eps, needed
        )
        return None, _at_rows(of_layer, layer, keep), of_weight, of_bias, None, None, None, None


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
        needed = to_layer, to_weight, to_bias = ctx.needs_input_grad[2:5]
        keep, rows, inner = ctx.mode.kept(ctx.layer, layer, gradient)
        one = 2 * prod(weight.shape) * prod(gradient.shape[2:] if ctx.options else gradient.shape[1:-1])
        ctx.mode.spared_flops += (len(layer) - len(rows)) * one * (to_layer + to_weight)
        rows, values = rows.to(inner.dtype), weight.to(inner.dtype)
        of_layer = of_weight = of_bias = None
        if len(rows) == 0:
            of_weight = torch.zeros_like(weight) if to_weight else None
            of_bias = torch.zeros(ctx.bias_sizes, dtype=weight.dtype, device=weight.device) if to_bias else None
            return None, None, torch.zeros_like(layer) if to_layer else None, of_weight, of_bias, None
        if ctx.options is None:
            flat = inner.flatten(0, -2)
            of_layer = (flat @ values).view(*inner.shape[:-1], -1) if to_layer else None
            of_weight = flat.t() @ rows.flatten(0, -2) if to_weight else None
            of_bias = flat.sum(0) if to_bias else None
        else:
            stride, padding, dilation, groups = ctx.options
            of_layer, of_weight, of_bias = _aten.convolution_backward(
                inner, rows, values, ctx.bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups,
                list(needed),
            )  # fmt: skip
        of_weight, of_bias = (None if found is None else found.to(weight.dtype) for found in (of_weight, of_bias))
        return None, None, _at_rows(of_layer, layer, keep), of_weight, of_bias, None


def _at_rows(found: Tensor | None, layer: Tensor, keep: Tensor | None) -> Tensor | None:
    """Return the gradient of a layer's input from that of its kept rows, zero in the others."""
    if found is None or keep is None:
        return None if found is None else found.to(layer.dtype)
    return torch.zeros_like(layer).index_copy_(0, keep, found.to(layer.dtype))


def kept_weights(norms: Tensor, threshold: float, chances: Tensor | None = None) -> Tensor:
    """Return the weight of each sample's gradient: 0 where it is left out.

    Without chances, samples with n_i < threshold are left out, and the gradient is biased by what they would have
    added: at most threshold in the norm of each output's gradient. With chances, (B,) uniform in [0, 1), such a sample
    is kept with probability n_i / threshold and then weighs threshold / n_i, which is unbiased.

    >>> kept_weights(torch.tensor([0.5, 0.01]), 0.1).tolist()
    [1.0, 0.0]
    """
    if chances is None:
        return (norms >= threshold).to(norms.dtype)
    probability = (norms / threshold).clamp(max=1)
    return torch.where(chances < probability, 1 / probability, torch.zeros_like(norms))


class SkippingRows(OutputRows):
    """Leave samples out of the backward pass of the forward pass inside the block.

    The threshold is that of `kept_weights`, the seed that of the chances of the unbiased form; None: the biased one.
    """

    def __init__(
        self, model: nn.Module, samples: int, threshold: float, seed: int | None, layers: SlicedLayers
    ) -> None:
        super().__init__(model, samples, self._leave_out)
        self._threshold, self._seed = threshold, seed
        self.sliced = SlicedBackward(samples, layers)  # counts the FLOPs that were spared
        self.kept = samples  # samples that took part in the backward pass

    def __enter__(self) -> SkippingRows:
        super().__enter__()
        self.sliced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.sliced.__exit__(*error)
        super().__exit__(*error)
        self.sliced.layers.warn()

    def _leave_out(self, gradient: Tensor) -> Tensor | None:
        norms = row_norms(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        chances = None
        if self._seed is not None:
            chances = torch.rand(len(norms), generator=torch.Generator().manual_seed(self._seed)).to(norms.device)
        weights = kept_weights(norms, self._threshold, chances)
        # Shapes depend on it, so the device is waited for: the decision of this step.
        keep = weights.nonzero().flatten()
        self.kept = len(keep)
        if len(keep) < len(norms):
            self.sliced.keep = keep
        elif chances is None:
            return None
        return weights


class ZeroGradients(GradientMethod):
    """Batches drawn uniformly, of which samples with nearly no loss gradient are left out of the backward pass.

    Those are samples with n_i below ``threshold``, > 0; ``unbiased`` keeps some of them with a larger weight, see
    `kept_weights`. A batch norm in train mode makes every sample's gradient depend on the others': in the backward pass
    it takes the kept samples for its whole batch, so the unbiased form, too, is biased by that. UserError: a threshold
    out of range.
    """

    name = "zero_gradients"

    def __init__(self, *args: Any, threshold: float = 0.01, unbiased: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        check_option("threshold", threshold, threshold > 0, "a number above 0")
        self.threshold, self.unbiased = threshold, unbiased
        self._layers = SlicedLayers(self.model)

    def rows(self, draw: Draw) -> SkippingRows:
        seed = None
        if self.unbiased:
            seed = int(torch.randint(2**31, (), generator=self.generator(purpose=2)))
            seed += 0 if draw.numbers is None else int(draw.numbers.sum())  # other draws of an iteration, other chances
        return SkippingRows(self.model, draw.size, self.threshold, seed, self._layers)

    def spared_flops(self, rows: Any) -> int:
        return int(rows.sliced.spared_flops)

    def observe(self, draw: Draw, rows: Any) -> None:
        self.meter.add(-self.spared_flops(rows))
