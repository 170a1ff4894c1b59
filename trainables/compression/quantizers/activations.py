"""Modules that quantize activations.

Shapes: x any; ranges ().
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainables.compression.quantizers.functions import (
    Grid,
    Mode,
    linear_grid,
    on_grid,
    pact_activation,
    unit_activation,
    wide,
)
from trainables.compression.quantizers.quantized_module import Frozen, Quantization

Clip = Literal["NONE", "AVG", "N_STD"]


class UnitActivation(Quantization):
    """`unit_activation` with k = bits."""

    def forward(self, x: Tensor) -> Tensor:
        return unit_activation(x, self.bits)


class LearnedClipActivation(Quantization):
    """`pact_activation` with a learned alpha.

    Args:
        bits: k.
        begin: initial alpha, > 0.
        options: device and dtype of alpha.
    """

    def __init__(self, bits: int, begin: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.alpha = nn.Parameter(torch.full((), begin, **options))

    def forward(self, x: Tensor) -> Tensor:
        return pact_activation(x, self.alpha, self.bits)


class MovingRange(Quantization):
    """Quantize to the exponential moving average of the batches' least and greatest values (Jacob et al. 2018, 3.1).

    In training mode, before batch n is quantized, r is set to the weighted average of the batches so far,
    sum_i d^(n-i) r_i / sum_i d^(n-i), which has no bias towards the first batch or zero (Kingma and Ba 2015,
    section 3). In evaluation mode r does not change; before the first batch the input is returned unchanged.

    Args:
        bits: k.
        mode: see `linear_grid`.
        decay: d in [0, 1].
        options: device and dtype of the range.
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, bits: int, mode: Mode, decay: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.mode = mode
        self.decay = decay
        self.register_buffer("low", torch.zeros((), **options))
        self.register_buffer("high", torch.zeros((), **options))
        # A tensor of a type that every device and torch's DistributedDataParallel support.
        self.register_buffer("seen", torch.zeros((), device=options["device"], dtype=torch.int64))

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
        for kept, value in zip((self.low, self.high), torch.aminmax(x), strict=True):
            new = value.to(kept.dtype)
            kept.copy_(torch.where(self.seen > 1, kept + self._weight_of_new(kept.dtype) * (new - kept), new))

    def _weight_of_new(self, dtype: torch.dtype) -> Tensor:
        """Return the last batch's weight in the average, (1 - d) / (1 - d^n), as a scalar on the range's device."""
        batches = self.seen.to(dtype)
        if self.decay == 1:
            return 1 / batches
        if self.decay == 0:
            return torch.ones_like(batches)
        return (1 - self.decay) / -torch.expm1(batches * math.log(self.decay))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, decay={self.decay}"


class CalibratedRange(Frozen):
    """Quantize to a range collected from batches in training mode; until it is frozen, x is returned unchanged.

    clip NONE: least and greatest of all values. AVG: the mean of the batches' least, and of their greatest values.
    N_STD: mean -+ c standard deviations (of all values, biased), limited to the least and greatest.

    Args:
        bits: k.
        mode: see `linear_grid`.
        clip: see above.
        deviations: c > 0; for N_STD.
        options: device and dtype of the range.
    """

    batches: Tensor
    low: Tensor
    high: Tensor
    values: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, bits: int, mode: Mode, clip: Clip, deviations: float | None, options: Mapping[str, Any]) -> None:
        super().__init__(bits, options["device"])
        self.mode = mode
        self.clip = clip
        self.deviations = deviations
        self.register_buffer("batches", torch.zeros((), device=options["device"], dtype=torch.int64))
        self.register_buffer("low", torch.zeros((), **options))
        self.register_buffer("high", torch.zeros((), **options))
        if clip == "N_STD":
            for name in ("values", "mean", "squares"):
                self.register_buffer(name, torch.zeros((), **options))

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            return on_grid(x, self.grid())
        if self.training and x.numel() > 0:
            self._see(x.detach())
        return x

    def grid(self) -> Grid:
        """Return the frozen grid, with scalar step and zero point."""
        return linear_grid(self.low, self.high, self.bits, self.mode)

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
        """Freeze the range and quantize from now on; requires that at least one batch was seen."""
        if self.clip == "N_STD":
            assert self.deviations is not None
            reach = self.deviations * (self.squares / self.values).sqrt()
            self.low.copy_(torch.maximum(self.low, self.mean - reach))
            self.high.copy_(torch.minimum(self.high, self.mean + reach))
        super().freeze()

    def extra_repr(self) -> str:
        clip = f"{self.clip} {self.deviations}" if self.clip == "N_STD" else self.clip
        return f"{super().extra_repr()}, mode={self.mode}, clip={clip}"
