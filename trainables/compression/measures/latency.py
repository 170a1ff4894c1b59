"""Latency of a model on its device.

Zero weights take as much time as others; only removed structures (`thinning`) make a model faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.model_copies import evaluating
from trainables.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Times of one forward pass."""

    samples: int
    """Number of samples in the batch."""
    median_s: float
    """Median, seconds."""
    lower_s: float
    """Lower quartile, seconds."""
    upper_s: float
    """Upper quartile, seconds."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Times of the given batch and of its first sample alone."""

    batch: PassTime
    single: PassTime

    def to_columns(self) -> dict[str, float]:
        """Return columns of a result row, in seconds."""
        return {"latency_s": self.single.median_s, "batch_latency_s": self.batch.median_s}


def latency(model: nn.Module, example: Tensor | Sequence[Any], *, repeats: int = 30, warm_up: int = 5) -> Latency:
    """Time forward passes in eval mode without gradients; modes, gradients and generators are restored afterwards.

    Args:
        model: with its weights on one device.
        example: the model's input tensor or arguments; the first dimension of tensors is the sample.
        repeats: measured passes, >= 2.
        warm_up: passes before them, >= 0: the first passes include the time in which libraries choose kernels.

    Raises:
        UserError: repeats are too few, the warm-up is negative, or the example has no tensor.
    """
    if repeats < 2:
        raise UserError(f"repeats of a latency must be >= 2, got {repeats}")
    if warm_up < 0:
        raise UserError(f"warm_up of a latency must be >= 0, got {warm_up}")
    arguments = (example,) if isinstance(example, Tensor) else tuple(example)
    if not any(isinstance(a, Tensor) and a.dim() for a in arguments):
        raise UserError("a latency needs an example with at least one tensor of samples, got none")
    single = tuple(a[:1] if isinstance(a, Tensor) and a.dim() else a for a in arguments)
    with evaluating(model):
        return Latency(batch=_timed(model, arguments, repeats, warm_up), single=_timed(model, single, repeats, warm_up))


def _timed(model: nn.Module, arguments: tuple[Any, ...], repeats: int, warm_up: int) -> PassTime:
    first = next(a for a in arguments if isinstance(a, Tensor) and a.dim())
    times = []
    for number in range(warm_up + repeats):
        _wait_for(first.device)
        begun = time.perf_counter()
        model(*arguments)
        _wait_for(first.device)
        if number >= warm_up:
            times.append(time.perf_counter() - begun)
    lower, _, upper = quantiles(times, n=4, method="inclusive")
    return PassTime(samples=len(first), median_s=median(times), lower_s=lower, upper_s=upper)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
