"""Batches and models without their values: the cost of a step depends only on shapes.

Shapes of an epoch's batches are kept as run lengths.

Shapes: a batch is a tuple of tensors of any shapes; run lengths are [(count, batch on the meta device), ...].
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import nn

from trainables.runtime.model_copy import copy_of
from trainables.workloads.base import Batch


def shapes_of(batch: Batch) -> Hashable:
    """Return the shapes and dtypes of a batch's tensors."""
    return tuple((t.shape, t.dtype) for t in batch)


def to_meta(batch: Batch) -> Batch:
    """Return the batch on the meta device, without its values."""
    return tuple(t.to("meta") for t in batch)


def on_meta(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device without copying any values; shared parameters stay shared."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy_of(model, memo)


def structure_of(model: nn.Module) -> Hashable:
    """Return a key, equal for models of equal modules with equal shapes, whose steps cost the same."""
    modules = tuple((name, type(module).__qualname__) for name, module in model.named_modules())
    return modules, tuple((name, tuple(p.shape), p.dtype) for name, p in model.named_parameters())


def _add(lengths: list[tuple[int, Batch]], batch: Batch) -> None:
    if lengths and shapes_of(lengths[-1][1]) == shapes_of(batch):
        lengths[-1] = (lengths[-1][0] + 1, lengths[-1][1])
    else:
        lengths.append((1, to_meta(batch)))


def run_lengths(batches: Iterable[Batch]) -> list[tuple[int, Batch]]:
    """Return batches as run lengths of their shapes."""
    lengths: list[tuple[int, Batch]] = []
    for batch in batches:
        _add(lengths, batch)
    return lengths


class EpochShapes:
    """Record the shapes of an epoch's batches, once.

    Args:
        steps_per_epoch: batches per epoch.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps = steps_per_epoch
        self._seen: list[tuple[int, Batch]] = []
        self.complete: list[tuple[int, Batch]] | None = None
        """Run lengths of the batches; None until a whole epoch was recorded."""

    def see(self, batch: Batch, step: int) -> None:
        """Record the batch of a step, counted from the epoch's start."""
        if self.complete is not None:
            return
        if step == 0:
            self._seen = []
        elif not self._seen:
            return  # the run started in the middle of an epoch
        _add(self._seen, batch)
        if step == self._steps - 1:
            self.complete = self._seen
