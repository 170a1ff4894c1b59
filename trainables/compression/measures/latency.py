"""Latency of a model on its device.

Zero weights take as much time as others; only removed structures (`thinning`) make a model faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.model_copies import evaluating
from trainables.errors import UserError

#: Passes that are not measured, since the first include the time in which libraries choose kernels; and those that are.
WARM_UP, REPEATS = 5, 30


def latency(model: nn.Module, example: Tensor | Sequence[Any]) -> float:
    """Return the median seconds of a forward pass of the first sample, in eval mode without gradients.

    Modes, gradients and generators are restored afterwards.

    Args:
        model: with its weights on one device.
        example: the model's input tensor or arguments; the first dimension of tensors is the sample.

    Raises:
        UserError: the example has no tensor.
    """
    arguments = (example,) if isinstance(example, Tensor) else tuple(example)
    device = next((a.device for a in arguments if isinstance(a, Tensor) and a.dim()), None)
    if device is None:
        raise UserError("a latency needs an example with at least one tensor of samples, got none")
    single = tuple(a[:1] if isinstance(a, Tensor) and a.dim() else a for a in arguments)
    times = []
    with evaluating(model):
        for _ in range(WARM_UP + REPEATS):
            _wait_for(device)
            begun = time.perf_counter()
            model(*single)
            _wait_for(device)
            times.append(time.perf_counter() - begun)
    return median(times[WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
