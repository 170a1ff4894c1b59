"""Clusters of points: k-means whose assignment minimises the variance of stratified sampling.

Symbols: x_i a point (a sketch of a gradient), C_k the centre of cluster k, N_k its samples.
Shapes: B points of a batch; N in all; K clusters; S numbers of a point; centres (K, S); assignments (N,) int64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def first_centres(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Return points of a batch as centres (K, S): each far from those before, with chances by squared distance.

    Source: Arthur, Vassilvitskii, "k-means++: The Advantages of Careful Seeding", 2007.
    """
    rows = points.double().cpu()
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    nearest = (rows - rows[chosen[0]]).square().sum(1)
    while len(chosen) < clusters:
        # Where all points are centres already, equal ones remain.
        chances = nearest if bool(nearest.sum() > 0) else torch.ones_like(nearest)
        ends = chances.cumsum(0)
        place = torch.rand((), generator=generator, dtype=torch.float64) * ends[-1]
        chosen.append(min(int(torch.searchsorted(ends, place, right=True)), len(rows) - 1))
        nearest = torch.minimum(nearest, (rows - rows[chosen[-1]]).square().sum(1))
    return points[torch.tensor(chosen, device=points.device)]


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Return squared distances (B, K)."""
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").square()


def assign(found: NDArray[np.float64], counts: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the cluster of each point: (B,).

    Args:
        found: squared distances (B, K).
        counts: N_k so far in this pass, (K,), updated here: point i goes to the least (N_k + 1) |C_k - x_i|^2, one
            after the other, since the variance of stratified sampling is N^-2 sum_k N_k^2 V_k. None: to the nearest.
    """
    if counts is None:
        return found.argmin(1)
    chosen = np.empty(len(found), dtype=np.int64)
    for i, row in enumerate(found):
        k = int(((counts + 1) * row).argmin())
        chosen[i] = k
        counts[k] += 1
    return chosen


class CentreSums:
    """Sums from which the next centres are made.

    Args:
        centres: (K, S), those before.
    """

    def __init__(self, centres: Tensor) -> None:
        self._before = centres
        self._sums = torch.zeros_like(centres)
        self._counts = centres.new_zeros(len(centres), 1)

    def add(self, points: Tensor, chosen: Tensor) -> None:
        """Add points (B, S) that went to these clusters (B,)."""
        self._counts.index_add_(0, chosen, self._counts.new_ones(len(chosen), 1))
        self._sums.index_add_(0, chosen, points)

    def centres(self, keep: float = 0.0) -> Tensor:
        """Return the means (K, S); of clusters without points the centres before, of others ``keep`` of these stays."""
        means = self._sums / self._counts.clamp(min=1)
        return torch.where(self._counts > 0, self._before.lerp(means, 1 - keep), self._before)


def split_largest(assignments: Tensor, clusters: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Give every empty cluster a random half of the largest one, in place; return pairs (empty, largest).

    Where there are fewer samples than clusters, some stay empty.

    Args:
        assignments: (N,).
        clusters: K.
        generator: of the halves.
    """
    done = []
    counts = torch.bincount(assignments, minlength=clusters)
    for k in (counts == 0).nonzero().flatten().tolist():
        largest = int(counts.argmax())
        members = (assignments == largest).nonzero().flatten()
        if len(members) < 2:
            break
        moved = members[torch.randperm(len(members), generator=generator)[: len(members) // 2]]
        assignments[moved] = k
        counts[k], counts[largest] = len(moved), len(members) - len(moved)
        done.append((k, largest))
    return done
