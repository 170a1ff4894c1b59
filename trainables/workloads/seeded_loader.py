"""Iterates a user's loader so that an epoch's batches depend only on the epoch and the seed.

Loaders shuffle and augment with the process's generators, or with generators that they keep from epoch to epoch. Here
they draw from generators that are seeded anew each epoch, and the model's dropout keeps using the process's own. So a
run can begin in any epoch, and two runs with one seed see the same batches, whatever their models draw.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables.runtime.isolation import cpu_generators, set_cpu_generators


def seeded_epoch(loader: Iterable[Any], epoch: int, seed: int) -> Iterator[Any]:
    """Yield the loader's items in this epoch.

    Args:
        loader: can be iterated once per epoch, such as a DataLoader or a list of batches.
        epoch: epoch, from 0.
        seed: seed of the run.
    """
    number = epoch_seed(epoch, seed)
    for holder in _holders(loader):
        if isinstance(getattr(holder, "generator", None), torch.Generator):
            holder.generator.manual_seed(number)
        if callable(getattr(holder, "set_epoch", None)):
            holder.set_epoch(epoch)
    states = (
        random.Random(number).getstate(),
        np.random.RandomState(number % 2**32).get_state(),
        torch.Generator().manual_seed(number).get_state(),
    )

    @contextmanager
    def own_generators() -> Iterator[None]:
        nonlocal states
        before = cpu_generators()
        set_cpu_generators(states)
        try:
            yield
        finally:
            states = cpu_generators()
            set_cpu_generators(before)

    with own_generators():
        items = iter(loader)  # a DataLoader draws here: the order, and the seeds of its worker processes
    while True:
        with own_generators():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def epoch_seed(epoch: int, seed: int) -> int:
    """Return the seed of one epoch of a run.

    >>> epoch_seed(0, 0) != epoch_seed(1, 0) != epoch_seed(0, 1)
    True
    """
    return (seed * 1_000_003 + epoch) % 2**63


@lru_cache(maxsize=2)
def shuffled_batches(samples: int, batch_size: int, epoch: int, seed: int) -> tuple[Tensor, ...]:
    """Return the sample numbers of each batch of an epoch; the last batch may be smaller."""
    # One generator per epoch: the order of epoch k is drawn without drawing those of the epochs before it.
    generator = torch.Generator().manual_seed(epoch_seed(epoch, seed))
    return torch.randperm(samples, generator=generator).split(batch_size)


def _holders(loader: Any) -> list[Any]:
    """Return a loader and its samplers and data sets, which may have their own generator or epoch."""
    found: list[Any] = []
    remaining = [loader]
    while remaining:
        holder = remaining.pop()
        if holder is not None and not any(holder is known for known in found):
            found.append(holder)
            remaining += [getattr(holder, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    return found
