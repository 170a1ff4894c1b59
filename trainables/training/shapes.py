"""Shapes of batches: what a step costs depends on them alone, so they are kept as run lengths over an epoch.

Shapes: a batch is a tuple of tensors of any shapes; run lengths are [(count, batch on the meta device), ...].
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from trainables.workloads.base import Batch


def shapes_of(batch: Batch) -> Hashable:
    """Shapes and dtypes of a batch's tensors."""
    return tuple((t.shape, t.dtype) for t in batch)


def to_meta(batch: Batch) -> Batch:
    """The batch on the meta device, without its numbers."""
    return tuple(t.to("meta") for t in batch)


def see_batch(lengths: list[tuple[int, Batch]], batch: Batch) -> None:
    """Take one more batch into the run lengths."""
    if lengths and shapes_of(lengths[-1][1]) == shapes_of(batch):
        lengths[-1] = (lengths[-1][0] + 1, lengths[-1][1])
    else:
        lengths.append((1, to_meta(batch)))


def run_lengths(batches: Iterable[Batch]) -> list[tuple[int, Batch]]:
    """Batches as run lengths of their shapes."""
    lengths: list[tuple[int, Batch]] = []
    for batch in batches:
        see_batch(lengths, batch)
    return lengths
