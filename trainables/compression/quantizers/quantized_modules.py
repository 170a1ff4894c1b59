"""Modules that quantizers add to a model's layers, their formulas, and functions that add them.

Only instances are changed, by parametrizations, child modules and hooks. A copy of the model has them too, because the
hooks look up the child module on the module that they are called with.

Shapes: x an activation, w a weight, both any; ranges () or, per channel, with w's number of dimensions and size 1
except along ``axis``. ``options`` are device and dtype of parameters and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainables.compression.schedule.configs import Clip, Mode

# --- Pure functions that quantize a tensor to values on a grid, with the same shape and dtype ------------------------
# Symbols: k bits; n = 2^k - 1 steps between 2^k levels; Q_k(r) = round(n r) / n for r in [0, 1]; s step; z zero point.
# Rounding is to the nearest, ties to even. Half precision is computed in single precision and rounded at the end. A
# weight that is exactly 0 stays exactly 0 in every scheme, so that pruned weights stay pruned.


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
    values = wide(x)
    limit = straight_through(alpha.to(values.dtype), lambda a: a.clamp(min=torch.finfo(a.dtype).tiny))
    scale = ((2**bits - 1) / limit.detach()).clamp(max=torch.finfo(values.dtype).max)
    clipped = torch.where(values >= limit, limit, values.clamp(min=0))
    return straight_through(clipped, lambda c: (c * scale).round_().div_(scale)).to(x.dtype)


class Grid(NamedTuple):
    """A grid of 2^k integers q with the values (q - zero) / scale."""

    scale: Tensor
    """1 / s > 0, by which values are multiplied as in Distiller, whose rounding is then equal to the last bit."""
    zero: Tensor  # z, an integer: the q of value 0.0
    q_min: int
    q_max: int
    low: Tensor  # lower end of the range; values below it have gradient 0
    high: Tensor  # upper end of the range; values above it have gradient 0


def linear_grid(low: Tensor, high: Tensor, bits: int, mode: Mode) -> Grid:
    """Return the grid for a range (Krishnamoorthi 2018, section 2; docs/compression.md). It always includes 0.

    q is in [-2^(k-1), 2^(k-1) - 1] with SYMMETRIC, without the least with SYMMETRIC_RESTRICTED, in [0, 2^k - 1] with
    ASYMMETRIC_UNSIGNED, whose values ASYMMETRIC_SIGNED has, too. A range of width 0 has s = 1. ``low`` <= ``high`` are
    () or one per channel; k is at least 2 if symmetric.
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


OUTPUT = "quantized_output"
INPUT = "quantized_input"


class Quantization(nn.Module):
    """A map from a tensor to one of the same shape and dtype with at most 2^k values, per channel or for all.

    ``quantize`` is the map, called with a tensor and k; a subclass has its own ``forward``.
    """

    def __init__(self, bits: int, quantize: Callable[[Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.quantize = quantize

    def forward(self, x: Tensor) -> Tensor:
        assert self.quantize is not None
        return self.quantize(x, self.bits)

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name, None) for name in ("bits", "mode", "axis", "decay", "clip", "deviations")}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class LearnedClipActivation(Quantization):
    """`pact_activation` with a learned alpha that begins at a value > 0."""

    def __init__(self, bits: int, begin: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.alpha = nn.Parameter(torch.full((), begin, **options))

    def forward(self, x: Tensor) -> Tensor:
        return pact_activation(x, self.alpha, self.bits)


class LinearWeight(Quantization):
    """Quantize a weight to the grid of its least and greatest value, computed again at each use.

    Each channel along ``axis`` has its own grid; None: one grid for all.
    """

    def __init__(self, bits: int, mode: Mode, axis: int | None) -> None:
        super().__init__(bits)
        self.mode, self.axis = mode, axis

    def forward(self, w: Tensor) -> Tensor:
        return on_grid(w, linear_grid(*value_range(w.detach(), self.axis), self.bits, self.mode))


class MovingRange(Quantization):
    """Quantize to the exponential moving average of the batches' least and greatest values (Jacob et al. 2018, 3.1).

    In training mode, before batch n is quantized, r is set to the weighted average of the batches so far, sum_i d^(n-i)
    r_i / sum_i d^(n-i), d in [0, 1], which has no bias towards the first batch or zero (Kingma and Ba 2015, section 3).
    In evaluation mode r does not change; before the first batch the input is returned unchanged.
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, bits: int, mode: Mode, decay: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.mode, self.decay = mode, decay
        _add_buffers(self, ("low", "high"), options)
        # A tensor of a type that every device and torch's DistributedDataParallel support.
        _add_buffers(self, ("seen",), {**options, "dtype": torch.int64})

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        if self.training:
            self._see(x.detach())
        quantized = on_grid(x, linear_grid(self.low, self.high, self.bits, self.mode))
        return quantized if self.training else torch.where(self.seen > 0, quantized, x)

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        self.seen += 1
        batches = self.seen.to(self.low.dtype)
        weight = 1 / batches  # of this batch in the average: (1 - d) / (1 - d^n)
        if self.decay != 1:
            weight = (1 - self.decay) / -torch.expm1(batches * (math.log(self.decay) if self.decay else -math.inf))
        for kept, value in zip((self.low, self.high), torch.aminmax(x), strict=True):
            new = value.to(kept.dtype)
            kept.copy_(torch.where(self.seen > 1, kept + weight * (new - kept), new))


class Frozen(Quantization):
    """Return its input unchanged until it is frozen, then on the grid of its range, in post-training quantization.

    The frozen state is stored twice: as a Python flag, so that the forward pass does not synchronize with the device,
    and as a buffer in the model's state dict. Loading a state sets the flag from the buffer.
    """

    is_frozen: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, bits: int, mode: Mode, device: torch.device) -> None:
        super().__init__(bits)
        self.mode = mode
        self.frozen = False
        _add_buffers(self, ("is_frozen",), {"dtype": torch.bool, "device": device})
        self.register_load_state_dict_post_hook(_follow_buffer)

    def grid(self) -> Grid:
        """Return the frozen grid, whose shapes broadcast to the quantized tensor."""
        return linear_grid(self.low, self.high, self.bits, self.mode)

    def forward(self, x: Tensor) -> Tensor:
        return on_grid(x, self.grid()) if self.frozen else x

    def freeze(self) -> None:
        """Quantize from now on; a calibrated range has seen at least one batch."""
        self.frozen = True
        self.is_frozen.fill_(True)


def _follow_buffer(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, Frozen)
    if not module.is_frozen.is_meta:
        module.frozen = bool(module.is_frozen)


class CalibratedRange(Frozen):
    """Quantize to a range collected from batches in training mode.

    clip NONE: least and greatest of all values. AVG: the mean of the batches' least, and of their greatest values.
    N_STD: mean -+ ``deviations`` standard deviations (of all values, biased), limited to the least and greatest.
    """

    batches: Tensor
    values: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, bits: int, mode: Mode, clip: Clip, deviations: float | None, options: Mapping[str, Any]) -> None:
        super().__init__(bits, mode, options["device"])
        self.clip, self.deviations = clip, deviations
        _add_buffers(self, ("batches",), {**options, "dtype": torch.int64})
        _add_buffers(self, ("low", "high"), options)
        if clip == "N_STD":
            _add_buffers(self, ("values", "mean", "squares"), options)

    @torch.no_grad()
    def take(self, found: Mapping[str, float]) -> None:
        """Take the range of earlier statistics: min, max, avg_min, avg_max, mean and std of all batches."""
        ends = ("avg_min", "avg_max") if self.clip == "AVG" else ("min", "max")
        self.low.fill_(found[ends[0]])
        self.high.fill_(found[ends[1]])
        self.batches.fill_(1)
        if self.clip == "N_STD":
            self.values.fill_(1)
            self.mean.fill_(found["mean"])
            self.squares.fill_(found["std"] ** 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.frozen and self.training and x.numel() > 0:
            self._see(x.detach())
        return super().forward(x)

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        low, high = (value.to(self.low.dtype) for value in torch.aminmax(x))
        if self.clip == "AVG":
            low = self.low + (low - self.low) / (self.batches + 1)
            high = self.high + (high - self.high) / (self.batches + 1)
        else:
            low = torch.where(self.batches > 0, torch.minimum(self.low, low), low)
            high = torch.where(self.batches > 0, torch.maximum(self.high, high), high)
        self.low.copy_(low)
        self.high.copy_(high)
        if self.clip == "N_STD":
            self._see_deviations(wide(x).to(self.mean.dtype))
        self.batches += 1

    def _see_deviations(self, x: Tensor) -> None:
        """Merge a batch into the running mean and sum of squared deviations (Chan et al. 1979)."""
        mean = x.mean()
        squares = ((x - mean) ** 2).sum()
        values = self.values + x.numel()
        apart = mean - self.mean
        self.squares += squares + apart**2 * self.values * (x.numel() / values)
        self.mean += apart * (x.numel() / values)
        self.values.copy_(values)

    @torch.no_grad()
    def freeze(self) -> None:
        if self.clip == "N_STD":
            assert self.deviations is not None
            reach = self.deviations * (self.squares / self.values).sqrt()
            self.low.copy_(torch.maximum(self.low, self.mean - reach))
            self.high.copy_(torch.minimum(self.high, self.mean + reach))
        super().freeze()


class FrozenWeight(Frozen):
    """Quantize to the range that the weight had when it was frozen; ``axis`` as in `LinearWeight`."""

    def __init__(self, bits: int, mode: Mode, axis: int | None, like: Tensor) -> None:
        super().__init__(bits, mode, like.device)
        self.axis = axis
        for name, value in zip(("low", "high"), value_range(wide(like.detach()), axis), strict=True):
            self.register_buffer(name, torch.zeros_like(value))

    def freeze_at(self, w: Tensor) -> None:
        """Take the range of w and quantize from now on."""
        low, high = value_range(w.detach(), self.axis)
        self.low.copy_(low)
        self.high.copy_(high)
        self.freeze()


class FrozenBias(Frozen):
    """Quantize a bias to signed integers times s_x s_w, the input and weight steps (Jacob et al. 2018, section 2.4).

    Shapes: b (C,); step () or, per channel, (C,). Bits are those of the sum that the bias is added to, >= 2.
    """

    step: Tensor

    def __init__(self, bits: int, like: Tensor, per_channel: bool) -> None:
        super().__init__(bits, "SYMMETRIC", like.device)
        values = wide(like.detach())
        self.register_buffer("step", torch.ones_like(values) if per_channel else values.new_ones(()))

    def grid(self) -> Grid:
        q_min, q_max = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        zero = torch.zeros_like(self.step)
        return Grid(1 / self.step, zero, q_min, q_max, self.step * q_min, self.step * q_max)

    def freeze_at(self, input_step: Tensor, weight_step: Tensor) -> None:
        """Take s_x, (), and s_w, () or one value per channel, and quantize from now on."""
        step = (input_step * weight_step).flatten()
        # The groups of a transposed convolution share their channels' steps.
        self.step.copy_(step.repeat(self.step.numel() // step.numel()).reshape(self.step.shape))
        self.freeze()


def _add_buffers(module: nn.Module, names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    for name in names:
        module.register_buffer(name, torch.zeros((), **options))


def is_quantized(model: nn.Module) -> bool:
    """Return whether a quantizer has changed the model."""
    return any(isinstance(module, Quantization) for module in model.modules())


def quantize_output(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize a layer's output.

    The layer keeps its class, name and hooks; other hooks see what the next layer sees; and torch's fused transformer
    layers, which would skip a replacement, are disabled by the hook.
    """
    layer.add_module(OUTPUT, quantization.train(layer.training))
    layer.register_forward_hook(_output_quantized, prepend=True)


def quantize_input(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize the first argument of a layer or model, where it is a floating-point tensor."""
    while isinstance(layer, nn.Sequential) and len(layer):  # it would run the quantization as its last layer, too
        layer = layer[0]
    layer.add_module(INPUT, quantization.train(layer.training))
    first = next(iter(signature(layer.forward).parameters.values()), None)
    name = "input" if first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD) else first.name
    layer.register_forward_pre_hook(partial(_input_quantized, name), with_kwargs=True)


def _output_quantized(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    quantized: Tensor = layer._modules[OUTPUT](output)  # type: ignore[misc]
    return quantized


def _input_quantized(
    name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    quantization: Any = layer._modules[INPUT]
    first = args[0] if args else kwargs.get(name)
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        return args, kwargs
    return ((quantization(first), *args[1:]), kwargs) if args else (args, {**kwargs, name: quantization(first)})
