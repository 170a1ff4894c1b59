"""Loader of a run's batches: prepared by worker processes where asked for, in page-locked memory where that helps."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainables.errors import UserError
from trainables.workloads.base import Batch, Workload

#: Batches that each worker prepares ahead.
AHEAD = 2


class StepSampler(Sampler[tuple[int, int]]):
    """Yield (epoch, step) from a position to the epoch's end.

    Args:
        steps_per_epoch: of the workload.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self.position = (0, 0)
        """Epoch and step of the next batch."""
        self._steps = steps_per_epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, start = self.position
        return ((epoch, step) for step in range(start, self._steps))

    def __len__(self) -> int:
        return self._steps - self.position[1]


class _Batches(Dataset[Batch]):
    """Batches by (epoch, step)."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload, self._seed = workload, seed

    def __getitem__(self, index: tuple[int, int]) -> Batch:
        epoch, step = index
        return self._workload.batch_at(epoch, self._seed, step)


class BatchLoader:
    """Batches of a run, which depend on seed, epoch and step alone, whoever prepares them.

    Args:
        workload: whose batches are loaded.
        seed: of the run.
        workers: processes that prepare batches; None for the workload's choice.
        pin_memory: whether batches lie in page-locked memory.

    Raises:
        UserError: workers for a workload that prepares its batches itself.
    """

    def __init__(self, workload: Workload, seed: int, *, workers: int | None = None, pin_memory: bool = False) -> None:
        self._workload, self._seed, self._pin = workload, seed, pin_memory
        self.workers = usable_workers(workload, workers)
        """Processes that prepare batches."""
        self._sampler = StepSampler(workload.steps_per_epoch)
        self._loader: DataLoader[Batch] | None = None
        if self.workers or (pin_memory and workload.by_step):
            self._loader = DataLoader(
                _Batches(workload, seed),
                batch_size=None,
                sampler=self._sampler,
                num_workers=self.workers,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # else the run's would be drawn from
                **_of_processes(self.workers),
            )

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return the batches of an epoch from a step on."""
        if self._loader is None:
            found = self._workload.train_batches_from(epoch, self._seed, start)
            return (tuple(t.pin_memory() for t in batch) for batch in found) if self._pin else found
        self._sampler.position = (epoch, start)
        return (tuple(batch) for batch in self._loader)

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None


def usable_workers(workload: Workload, wanted: int | None) -> int:
    """Return how many processes prepare a workload's batches.

    Raises:
        UserError: any are wanted for a workload that prepares its batches itself.
    """
    if wanted is None:
        wanted = workload.loader_workers
    elif wanted and not workload.by_step:
        raise UserError(
            f"loader_workers must be 0 for workload {workload.name}, whose batches come from a loader of its own, got "
            f"{wanted}: leave it out, or set num_workers of that loader"
        )
    if wanted and "fork" not in multiprocessing.get_all_start_methods():
        warnings.warn(
            f"loader_workers={wanted} has no effect: this platform cannot fork processes, so batches are prepared in "
            "the training process",
            stacklevel=2,
        )
        return 0
    return wanted


def _of_processes(workers: int) -> dict[str, Any]:
    """Return options of a DataLoader with workers; a fork shares data that lies in memory or is mapped."""
    if not workers:
        return {}
    return {"multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": AHEAD}
