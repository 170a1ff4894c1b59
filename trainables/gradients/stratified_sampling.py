"""Stratified sampling: batches that take samples of all clusters in turn, and the weights that make them unbiased.

Shapes: N samples; B samples of a batch; assignments (N,) int64; weights (B,).
Symbols: M clusters that have samples, N_k samples of cluster k.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainables.errors import UserError
from trainables.workloads.sample_access import IndexedDataset, reservoir
from trainables.workloads.seeded_loader import epoch_seed

__all__ = ["IndexedDataset", "StratifiedBatches", "reservoir", "stratified_draw"]


def stratified_draw(assignments: Tensor, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return numbers (B,) and weights (B,) of a batch: clusters in random order, a random sample of each, in turn.

    A cluster that comes up again in a batch gives another of its samples as long as it has one. With weights M N_k / N,
    the weighted mean of the batch has the mean of all samples as its expectation; where M divides B, its variance is
    sum_k (N_k / N)^2 V_k M / B at most, V_k the variance within cluster k.

    Source: Faghri et al., arXiv:2007.04532, 2020, section 3.
    """
    order = torch.randperm(len(assignments), generator=generator)
    of_order = assignments[order]
    grouped = order[of_order.argsort(stable=True)]  # each cluster's samples together, in random order
    counts = torch.bincount(assignments)
    clusters = counts.nonzero().flatten()
    starts = counts.cumsum(0) - counts
    rounds = -(-batch_size // len(clusters))
    turns = torch.cat([torch.randperm(len(clusters), generator=generator) for _ in range(rounds)])[:batch_size]
    chosen = clusters[turns]
    times = torch.arange(batch_size) // len(clusters)  # how often the cluster has come up before
    numbers = grouped[starts[chosen] + times % counts[chosen]]
    return numbers, stratified_weights(assignments, numbers)


def stratified_weights(assignments: Tensor, numbers: Tensor) -> Tensor:
    """Return the weights of samples, M N_k / N: (B,) float32."""
    counts = torch.bincount(assignments)
    return int((counts > 0).sum()) * counts[assignments[numbers]] / len(assignments)


class StratifiedBatches(Sampler[list[int]]):
    """Batches of sample numbers for a DataLoader (``batch_sampler=``) of an `IndexedDataset`.

        batches = StratifiedBatches(assignments, batch_size=64, seed=0)
        for numbers, (inputs, targets) in DataLoader(IndexedDataset(dataset), batch_sampler=batches):
            loss = (batches.weights(numbers) * F.cross_entropy(model(inputs), targets, reduction="none")).mean()

    Args:
        assignments: (N,) int64, the cluster of each sample; set the attribute when clusters have changed.
        batch_size: B.
        seed: of all draws; `set_epoch` changes the epoch's.

    Raises:
        UserError: no samples, or a batch size below 1.
    """

    def __init__(self, assignments: Tensor, batch_size: int, seed: int = 0) -> None:
        if len(assignments) == 0 or batch_size < 1:
            raise UserError(
                f"stratified batches need samples and a batch_size >= 1, got {len(assignments)} and {batch_size}"
            )
        self.assignments, self.batch_size, self.seed = assignments, batch_size, seed
        self._epoch = 0

    def __len__(self) -> int:
        return -(-len(self.assignments) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Draw other batches in each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(epoch_seed(self._epoch, self.seed))
        for _ in range(len(self)):
            yield stratified_draw(self.assignments, self.batch_size, generator)[0].tolist()

    def weights(self, numbers: Tensor) -> Tensor:
        """Return the weights of samples, M N_k / N: (B,) float32."""
        return stratified_weights(self.assignments, numbers)
