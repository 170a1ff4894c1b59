"""Parametrizations (`torch.nn.utils.parametrize`) that quantize a parameter; they have no parameters themselves.

Shapes: w any; per channel, ranges keep w's number of dimensions with size 1 except along ``axis``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.compression.quantizers.functions import (
    Grid,
    Mode,
    dorefa_weight,
    linear_grid,
    on_grid,
    value_range,
    wide,
    wrpn_weight,
)
from trainables.compression.quantizers.quantized_module import Frozen, Quantization


class DorefaWeight(Quantization):
    """`dorefa_weight` with k = bits."""

    def forward(self, w: Tensor) -> Tensor:
        return dorefa_weight(w, self.bits)


class WrpnWeight(Quantization):
    """`wrpn_weight` with k = bits >= 2."""

    def forward(self, w: Tensor) -> Tensor:
        return wrpn_weight(w, self.bits)


class LinearWeight(Quantization):
    """Quantize a weight to the grid of its least and greatest value, computed again at each use.

    Args:
        bits: k.
        mode: see `linear_grid`.
        axis: of the channels, each with its own grid; None: one grid for all.
    """

    def __init__(self, bits: int, mode: Mode, axis: int | None) -> None:
        super().__init__(bits)
        self.mode = mode
        self.axis = axis

    def forward(self, w: Tensor) -> Tensor:
        return on_grid(w, linear_grid(*value_range(w.detach(), self.axis), self.bits, self.mode))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, axis={self.axis}"


class FrozenWeight(Frozen):
    """Quantize to the range that the weight had when it was frozen; before that return the weight unchanged.

    Args:
        bits, mode, axis: as in `LinearWeight`.
        like: the weight.
    """

    low: Tensor
    high: Tensor

    def __init__(self, bits: int, mode: Mode, axis: int | None, like: Tensor) -> None:
        super().__init__(bits, like.device)
        self.mode = mode
        self.axis = axis
        low, high = value_range(wide(like.detach()), axis)
        self.register_buffer("low", torch.zeros_like(low))
        self.register_buffer("high", torch.zeros_like(high))

    def forward(self, w: Tensor) -> Tensor:
        return on_grid(w, self.grid()) if self.frozen else w

    def grid(self) -> Grid:
        """Return the frozen grid; its shapes broadcast to the weight."""
        return linear_grid(self.low, self.high, self.bits, self.mode)

    def freeze_at(self, w: Tensor) -> None:
        """Take the range of w and quantize from now on."""
        low, high = value_range(w.detach(), self.axis)
        self.low.copy_(low)
        self.high.copy_(high)
        self.freeze()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, axis={self.axis}"


class FrozenBias(Frozen):
    """Quantize a bias to signed integers times s_x s_w, the input and weight steps (Jacob et al. 2018, section 2.4).

    Until both are known the bias is returned unchanged. Shapes: b (C,); step () or (C,).

    Args:
        bits: k >= 2, of the sum that the bias is added to.
        like: the bias.
        per_channel: whether the weight has one step per channel.
    """

    step: Tensor

    def __init__(self, bits: int, like: Tensor, per_channel: bool) -> None:
        super().__init__(bits, like.device)
        values = wide(like.detach())
        self.register_buffer("step", torch.ones_like(values) if per_channel else values.new_ones(()))

    def forward(self, b: Tensor) -> Tensor:
        if not self.frozen:
            return b
        q_min, q_max = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        zero = torch.zeros_like(self.step)
        return on_grid(b, Grid(1 / self.step, zero, q_min, q_max, self.step * q_min, self.step * q_max))

    def freeze_at(self, input_step: Tensor, weight_step: Tensor) -> None:
        """Take s_x, (), and s_w, () or one value per channel, and quantize from now on."""
        step = (input_step * weight_step).flatten()
        # The groups of a transposed convolution share their channels' steps.
        self.step.copy_(step.repeat(self.step.numel() // step.numel()).reshape(self.step.shape))
        self.freeze()


def channel_axis(layer: nn.Module, per_channel: bool) -> int | None:
    """Return the axis of the layer's weight whose slices (filters) each get a grid; None: one grid for all.

    An embedding has one grid, since its rows are outputs and not filters.
    """
    if not per_channel or isinstance(layer, nn.Embedding):
        return None
    return 1 if isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) else 0
