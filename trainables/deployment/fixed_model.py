"""A copy of a trained model in which quantized weights are stored as integers and ranges of activations are constants.

Symbols as in `quantized_modules`: value = (q - z) s. Shapes: w any; s, z () or, per channel, (C,).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators that become ONNX's QDQ
from torch import Tensor, nn

from trainables.compression.quantizers.quantized_modules import (
    INPUT,
    OUTPUT,
    CalibratedRange,
    Frozen,
    FrozenBias,
    FrozenWeight,
    Grid,
    LearnedClipActivation,
    LinearWeight,
    MovingRange,
    Quantization,
    dorefa_weight,
    linear_grid,
    unit_activation,
    value_range,
    wide,
    wrpn_weight,
)
from trainables.runtime.model_copy import copy_of

_QDQ = torch.ops.quantized_decomposed
#: Modules whose values lie on a grid that `even_grid` knows; those of a class of their own may do otherwise.
KINDS = (LinearWeight, MovingRange, CalibratedRange, FrozenWeight, FrozenBias, LearnedClipActivation)


def fixed_copy(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return a copy in eval mode that computes what the model does, without formulas of training.

    A weight on an even grid of at most 8 bits is stored as int8, an activation becomes a pair of QuantizeLinear and
    DequantizeLinear on uint8; biases are stored as the values that they have.

    Returns:
        The copy, and the names of quantized weights and activations that no 8-bit integer can hold: these compute with
        the same few values, in floats.
    """
    found = cpu_copy(model).requires_grad_(False)
    simulated = []
    with torch.no_grad():
        for name, module in list(found.named_modules()):
            prefix = f"{name}." if name else ""
            for what, behind in list(getattr(module, "parametrizations", {}).items()):
                if isinstance(behind[-1], Quantization) and not _fix_parameter(module, what, behind):
                    simulated.append(prefix + what)
            for which, words in ((INPUT, "input"), (OUTPUT, "output")):
                quantization = module._modules.get(which)
                if isinstance(quantization, Quantization):
                    module._modules[which] = fixed = _fixed_activation(quantization)
                    if isinstance(fixed, Rounded | Quantization):
                        simulated.append(f"{prefix}{words}")
    return found, simulated


def cpu_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in eval mode."""
    return copy_of(model).cpu().eval()


def _is_own(quantization: Quantization) -> bool:
    """Return whether a quantization is of the user's code, whose values may lie anywhere."""
    formulas = (unit_activation, wrpn_weight, dorefa_weight)
    return type(quantization) not in KINDS and (
        type(quantization) is not Quantization or quantization.quantize not in formulas
    )


def even_grid(quantization: Quantization, w: Tensor | None = None) -> Grid | None:
    """Return the grid of all values that a quantization returns in eval mode; of weights ``w``, the float ones.

    None: it returns its input unchanged (a range that no batch has set).
    """
    steps = 2**quantization.bits - 1
    match quantization:
        case LinearWeight():
            assert w is not None
            return linear_grid(*value_range(w, quantization.axis), quantization.bits, quantization.mode)
        case MovingRange():
            if not quantization.seen:
                return None
            return linear_grid(quantization.low, quantization.high, quantization.bits, quantization.mode)
        case Frozen():
            return quantization.grid() if quantization.frozen else None
        case LearnedClipActivation():
            return _from_zero(steps / wide(quantization.alpha.detach()), 0, steps)
    one = torch.ones(())
    if quantization.quantize is unit_activation:
        return _from_zero(one * steps, 0, steps)
    if quantization.quantize is wrpn_weight:
        steps = 2 ** (quantization.bits - 1) - 1
        return _from_zero(one * steps, -steps, steps)
    assert w is not None
    if quantization.bits == 1:
        mean = wide(w).abs().sum() / torch.count_nonzero(w).clamp(min=1)
        return _from_zero(1 / mean if mean > 0 else one, -1, 1)
    return _from_zero(one * steps, -steps, steps)  # every second one, and 0


def _from_zero(scale: Tensor, q_min: int, q_max: int) -> Grid:
    zero = torch.zeros_like(scale)
    return Grid(scale, zero, q_min, q_max, q_min / scale, q_max / scale)


class Integers(nn.Module):
    """Return the values of an int8 weight, w = (q - z) s, with s and z along ``axis`` if one per channel."""

    def __init__(self, scale: Tensor, zero: Tensor, axis: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis, self.dtype = axis, dtype
        self.one = (float(scale), int(zero)) if axis is None else None
        if axis is not None:
            self.register_buffer("scale", scale.flatten())
            self.register_buffer("zero", zero.long().flatten())

    def forward(self, q: Tensor) -> Tensor:
        if self.one is not None:
            return _QDQ.dequantize_per_tensor.default(q, *self.one, -128, 127, torch.int8).to(self.dtype)
        how: Any = (self.scale, self.zero, self.axis)
        return _QDQ.dequantize_per_channel.default(q, *how, -128, 127, torch.int8).to(self.dtype)


class Requantized(nn.Module):
    """Quantize to uint8 in [low, high] and back, x = (q - z) s."""

    def __init__(self, scale: float, zero: int, low: int, high: int) -> None:
        super().__init__()
        self.scale, self.zero, self.low, self.high = scale, zero, low, high

    def forward(self, x: Tensor) -> Tensor:
        how = (self.scale, self.zero, 0, 255, torch.uint8)
        q = _QDQ.quantize_per_tensor.default(x.float(), *how)
        if (self.low, self.high) != (0, 255):
            q = q.clamp(self.low, self.high)
        return _QDQ.dequantize_per_tensor.default(q, *how).to(x.dtype)


class Rounded(nn.Module):
    """Round to a grid in floats, for more than 8 bits."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.scale, self.zero = float(grid.scale), float(grid.zero)
        self.low, self.high = grid.q_min, grid.q_max

    def forward(self, x: Tensor) -> Tensor:
        q = (x.float() * self.scale + self.zero).round().clamp(self.low, self.high)
        return ((q - self.zero) / self.scale).to(x.dtype)


def _fixed_activation(quantization: Quantization) -> nn.Module:
    if _is_own(quantization) or quantization.quantize is dorefa_weight:
        return quantization
    grid = even_grid(quantization)
    if grid is None:
        return nn.Identity()
    if grid.q_max - grid.q_min > 255:
        return Rounded(grid)
    shift = 128 if grid.q_min < 0 else 0  # kernels are fastest with unsigned activations and signed weights
    return Requantized(
        1 / float(grid.scale), int(grid.zero) + shift, max(grid.q_min + shift, 0), min(grid.q_max + shift, 255)
    )


def _fix_parameter(module: nn.Module, what: str, behind: Any) -> bool:
    """Store a parametrized tensor as integers, else as its values; return whether they lie on few enough steps."""
    value: Tensor = getattr(module, what).detach().clone()
    quantization = behind[-1]
    given: Tensor = behind.original
    for before in list(behind)[:-1]:
        given = before(given)
    is_own = _is_own(quantization)
    grid = None if is_own else even_grid(quantization, given.detach())
    stored, how = value, nn.Identity()
    few = what == "bias" or (not is_own if grid is None else grid.q_max - grid.q_min <= 255)
    if grid is not None and what != "bias" and few:
        shift = 128 if grid.q_max > 127 else 0
        stored = (wide(value) * grid.scale + grid.zero - shift).round_().to(torch.int8)
        axis = getattr(quantization, "axis", None) if grid.scale.numel() > 1 else None
        how = Integers((1 / grid.scale).float(), grid.zero - shift, axis, value.dtype)  # type: ignore[assignment]
    behind._modules.clear()
    behind._modules["0"] = how
    behind.original = nn.Parameter(stored, requires_grad=False)
    return few
