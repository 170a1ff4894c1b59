"""One training run over several processes: each trains on its rows of every batch, and counts are summed.

Shapes: a batch of B rows is dealt out, rows r, r + W, r + 2W, ... to process r of W.

The gradients are those of the whole batch: a process's mean loss is weighted by its rows, W n_r / B, and gradients are
averaged over the processes. Norms use only the rows of their process, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from trainables.gradskip.controller import AttachedGradientSkip
from trainables.gradskip.data_parallel import DistributedDataParallel
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE, read_state
from trainables.runtime.isolation import kept_generators
from trainables.runtime.model_copy import copy_of
from trainables.storage import atomic_write
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch, Workload
from trainables.workloads.seeded_loader import epoch_seed


class _Loss(nn.Module):
    """A workload's loss as a module, so that the wrapper sees one forward pass whatever the loss uses of the model."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, *batch: Tensor) -> Tensor:
        return self._workload.loss(self.model, batch)


def worker_file(rank: int) -> str:
    """Return the name of a process's file in a checkpoint folder; rank 0 uses that of a single-process run."""
    return CHECKPOINT_FILE if rank == 0 else f"worker-{rank}.pt"


class ParallelRun(TrainingRun):
    """`TrainingRun` in each of the processes of torch.distributed's default group, `config.workers` of them.

    Every process calls the same methods. Result rows describe the whole run: FLOPs and bytes are sums over the
    processes, peak memory is the maximum. The first process evaluates.
    """

    def _build(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        assert self.size == self.config.workers
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        super()._build()
        gpu: dict[str, Any] = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
        module = _Loss(self.workload, self.model)
        # The search for parameters that the loss does not use costs time, so it is on only if there are any.
        options = {**gpu, "find_unused_parameters": self._leaves_out()}
        if isinstance(self.method, AttachedGradientSkip):
            self.optimizer.gradskip = self.method.gradskip  # type: ignore[attr-defined]  # as `wrap` leaves it
            self._parallel: nn.Module = DistributedDataParallel(module, self.optimizer, **options)
        else:
            self._parallel = TorchDataParallel(module, **options)
        # Dropout masks differ between processes; weights were drawn equally and sent by the first process.
        torch.manual_seed(epoch_seed(self.rank, self.config.seed))
        self._weight = 1.0

    def _leaves_out(self) -> bool:
        """Return whether a parameter that trains gets no gradient from the loss."""
        with kept_generators([self.device]):
            model = copy_of(self.model).train()
            self._example_forward(model).backward()
        return any(p.requires_grad and p.grad is None for p in model.parameters())

    def _loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self._parallel(*batch)
        return loss

    def _weighted(self, loss: Tensor) -> Tensor:
        return loss * self._weight

    def _batches(self) -> Iterator[Batch]:
        for batch in super()._batches():
            rows = len(batch[0])
            own = len(range(self.rank, rows, self.size))
            self._weight = self.size * own / rows
            # A process without a row trains on one of weight 0, because the others wait for its gradients.
            part = slice(self.rank, None, self.size) if own else slice(0, 1)
            yield tuple(t[part] for t in batch)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._parallel.train()

    def _samples_of(self, batch: Batch) -> int:
        return len(batch[0]) if self._weight else 0  # the row was another process's

    @property
    def train_energy_j(self) -> float | None:
        """Return None: a process knows its own card's alone."""
        return None

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate and return the epoch's row, with the counts of all processes."""
        cost = self.cost
        own_counts, own_before = cost.counts, cost.flops_before
        names = [name for name in own_counts if name != "step"]
        own = [self._samples, own_before, *(own_counts[name] for name in names)]
        sums = torch.tensor(own, dtype=torch.int64, device=self.device)
        dist.all_reduce(sums)
        dist.all_reduce(self._loss_sum)
        peak = torch.tensor([self.peak_bytes], dtype=torch.int64, device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self._peak_before = int(peak)
        self._samples, cost.flops_before, *totals = sums.tolist()
        cost.counts = {**own_counts, **dict(zip(names, totals, strict=True))}
        try:
            return super().end_epoch()
        finally:
            cost.counts, cost.flops_before = own_counts, own_before

    def _metrics(self, split: str) -> dict[str, float]:
        # Broadcast, so that all processes end together if it is not finite.
        name = self.quality.name
        found = super()._metrics(split) if self.rank == 0 else {name: 0.0}
        told = torch.tensor([found[name]], dtype=torch.float64, device=self.device)
        dist.broadcast(told, 0)
        return {**found, name: float(told)}

    def save(self, folder: str | Path) -> None:
        """Write this process's part of a checkpoint; the first process's file is written last and completes it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / worker_file(self.rank)) as file:
            torch.save(self.state_dict(), file)
            if self.rank == 0:
                dist.barrier()  # until the others have renamed theirs
        if self.rank != 0:
            dist.barrier()

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint of the same number of processes."""
        self.load_state_dict(read_state(Path(folder) / worker_file(self.rank)))
