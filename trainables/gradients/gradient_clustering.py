"""Gradient clustering: samples with similar gradients form clusters, and every batch has samples of all of them.

Symbols: x_i a point, the sketch of sample i's gradient; C_k the centre of cluster k, N_k its samples; M clusters that
have samples.
Shapes: N samples; K clusters; B samples or points of a batch; S numbers of a sketch; assignments (N,) int64; centres
(K, S); weights (B,).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import CLUSTER_MODES, ONLINE_CLUSTER_EVERY, usual_cluster_interval
from trainables.gradients.gradient_method import Draw, GradientMethod, check_interval, check_option
from trainables.gradients.layer_signals import LayerSignals, rows_of_inputs, rows_of_outputs, treatable_layers
from trainables.gradients.output_rows import OutputRows
from trainables.workloads.batch_shapes import shapes_of

#: p, the numbers that a side of a layer is reduced to.
SIDE = 8
#: Samples for each cluster among which the first centres are chosen.
FIRST_POINTS = 8


class GradientSketch:
    """Sketches of per-sample gradients: a few numbers a layer that keep distances between gradients, about.

    The gradient of sample i's own loss with respect to a layer's weight is G_i = sum_t d_t a_t^T, d_t the output
    gradient and a_t the input at place t. Its sketch is P^T G_i Q with fixed random matrices P, Q of independent normal
    numbers of variance 1 / p, so that the expected squared distance of two sketches is that of the gradients, and equal
    gradients have equal sketches. It is computed as sum_t (P^T d_t) (Q^T a_t)^T: no per-sample gradient is ever built.
    A side of a layer of at most p numbers is taken as it is. Biases are left out.

    Layers are those of `layer_signals.treatable_layers`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device, seed: int, side: int = SIDE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._layers = layers
        self._sides: dict[str, list[Tensor | None]] = {}
        self._places: dict[str, slice] = {}
        self.width = 0  # S, at most p^2 a layer
        for name, layer in layers.items():
            assert isinstance(layer.weight, Tensor)
            outputs, inputs = layer.weight.flatten(1).shape
            self._sides[name] = [
                torch.randn(size, side, generator=generator).div_(side**0.5).to(device) if size > side else None
                for size in (outputs, inputs)
            ]
            start, self.width = self.width, self.width + min(outputs, side) * min(inputs, side)
            self._places[name] = slice(start, self.width)

    def of(self, recorded: LayerSignals, samples: int, scale: Tensor | float) -> tuple[Tensor, int]:
        """Return the sketches of a batch's gradients (B, S), and the FLOPs that they took.

        The scale, a number or (B,), makes a row's gradient that of the sample's own loss. UserError: a layer whose
        first dimension is not the samples'.
        """
        found: Tensor | None = None
        flops = 0
        for name, layer in self._layers.items():
            for seen, gradient in recorded.calls(name):
                if len(seen) != samples:
                    raise UserError(
                        f"per-sample gradients need layers with the samples' dimension first, got {len(seen)} rows in "
                        f"layer {name} for a batch of {samples}: set batch_first=True, or use another method"
                    )
                outputs, inputs = self._sides[name]
                d = rows_of_outputs(layer, gradient).float()
                a = _projected(layer, seen.float(), inputs)
                if outputs is not None:
                    flops += 2 * d.numel() * outputs.shape[1]
                    d = d @ outputs
                if inputs is not None:
                    flops += 2 * a.numel() * len(inputs)
                flops += 2 * d.numel() * a.shape[2]
                if found is None:
                    found = torch.zeros(samples, self.width, device=a.device)
                found[:, self._places[name]] += (d.transpose(1, 2) @ a).flatten(1)
        assert found is not None, "a backward pass through none of the layers"
        return found * (scale if isinstance(scale, float) else scale.view(-1, 1)), flops


def _projected(layer: nn.Module, seen: Tensor, sides: Tensor | None) -> Tensor:
    """Return Q^T a_t of a layer's input: (B, T, p); of a convolution by one with Q as its kernels, without patches."""
    if sides is None:
        return rows_of_inputs(layer, seen)
    if isinstance(layer, nn.Linear):
        return rows_of_inputs(layer, seen) @ sides
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    kernels = sides.T.reshape(-1, *layer.weight.shape[1:])
    return layer._conv_forward(seen, kernels, None).flatten(2).transpose(1, 2)


# --- Clusters of points: k-means whose assignment minimises the variance of stratified sampling -----------------------


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
    """Return the cluster of each point (B,), given its squared distances (B, K).

    With N_k so far in this pass, (K,), which are updated, point i goes to the least (N_k + 1) |C_k - x_i|^2, one after
    the other, since the variance of stratified sampling is N^-2 sum_k N_k^2 V_k; without, to the nearest centre.
    """
    if counts is None:
        return found.argmin(1)
    chosen = np.empty(len(found), dtype=np.int64)
    for i, row in enumerate(found):
        chosen[i] = ((counts + 1) * row).argmin()
        counts[chosen[i]] += 1
    return chosen


class CentreSums:
    """Sums from which the next centres are made, given those before (K, S)."""

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
    """Give every empty one of K clusters a random half of the largest, in place; return pairs (empty, largest).

    Where there are fewer samples than clusters, some stay empty.
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


# --- Stratified sampling: batches that take samples of all clusters in turn, and the weights that make them unbiased


def stratified_draw(assignments: Tensor, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return numbers (B,) and weights (B,) of a batch: clusters in random order, a random sample of each, in turn.

    A cluster that comes up again in a batch gives another of its samples as long as it has one. With weights M N_k / N,
    the weighted mean of the batch has the mean of all samples as its expectation; where M divides B, its variance is
    sum_k (N_k / N)^2 V_k M / B at most, V_k the variance within cluster k.

    Source: Faghri et al., arXiv:2007.04532, 2020, section 3.
    """
    order = torch.randperm(len(assignments), generator=generator)
    grouped = order[assignments[order].argsort(stable=True)]  # each cluster's samples together, in random order
    counts = torch.bincount(assignments)
    clusters = counts.nonzero().flatten()
    starts = counts.cumsum(0) - counts
    rounds = -(-batch_size // len(clusters))
    turns = torch.cat([torch.randperm(len(clusters), generator=generator) for _ in range(rounds)])[:batch_size]
    chosen = clusters[turns]
    times = torch.arange(batch_size) // len(clusters)  # how often the cluster has come up before
    numbers = grouped[starts[chosen] + times % counts[chosen]]
    return numbers, len(clusters) * counts[chosen] / len(assignments)


@dataclass(frozen=True, kw_only=True)
class GradientCluster:
    """Samples that share a gradient."""

    size: int  # samples
    spread: float  # mean squared distance of their gradients from the centre
    examples: tuple[int, ...]  # numbers of the samples nearest to the centre, the nearest first


class WatchedRows(OutputRows):
    """Weigh a draw's rows, and record layers, of the weighted mean of the samples' losses, in the same pass."""

    def __init__(self, model: nn.Module, draw: Draw, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(model, draw.size, lambda gradient: draw.weights)
        self.layers = LayerSignals(layers)

    def __enter__(self) -> WatchedRows:
        super().__enter__()
        self.layers.__enter__()
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        self.layers.__exit__()
        super().__exit__(kind, *error)


class GradientClustering(GradientMethod):
    """Stratified batches over clusters of per-sample gradients of linear and convolution layers.

    The estimate is unbiased whatever the clusters are: weights are M N_k / N (`stratified_draw`).

    Source: Faghri et al., arXiv:2007.04532, 2020, section 3. Other than the published code, a pass counts N_k from 0 on
    (with the counts of the pass before, the variance was 16 times SGD's), and centres are those of sketches, not outer
    products of mean inputs and mean output gradients: of a convolution, whose gradients are sums over places, equal
    gradients would not be at distance 0.

    Args:
        clusters: K, in 1..N.
        mode: ``full``: passes over all samples, now and then; ``online``: each update looks at the batch that is
            trained, at less than a gradient's cost.
        every: iterations from one update to the next, >= 1. None: `usual_cluster_interval`, with which a step costs
            less than two plain ones; online `ONLINE_CLUSTER_EVERY`.
        iterations: passes of a full update, >= 1; each costs about a pass over the data.
        decay: of the centres in online mode, in [0, 1).

    UserError: an option out of range, fewer samples than clusters, or no layer to look at.
    """

    name = "gradient_clustering"
    chooses_samples = True

    def __init__(
        self,
        *args: Any,
        clusters: int = 10,
        mode: str = "full",
        every: int | None = None,
        iterations: int = 3,
        decay: float = 0.99,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        count = self.data.count
        check_option("clusters", clusters, 1 <= clusters <= count, f"in 1..{count}, the samples there are")
        if mode not in CLUSTER_MODES:
            raise unknown_name("mode of gradient clustering", mode, CLUSTER_MODES)
        check_interval("every", every)
        check_interval("iterations", iterations)
        check_option("decay", decay, 0 <= decay < 1, "in [0, 1)")
        self.clusters, self.mode, self.iterations, self.decay = clusters, mode, iterations, decay
        batches = -(-count // self.batch_size)
        self.every = every or (usual_cluster_interval(batches, iterations) if mode == "full" else ONLINE_CLUSTER_EVERY)
        self.layers = treatable_layers(self.model, "gradient clustering")
        generator = torch.Generator().manual_seed(self.seed)
        # Before the first update, clusters are random: stratified sampling is then no worse than plain.
        self.assignments = torch.randperm(count, generator=generator) % clusters  # (N,), the cluster of each sample
        self.sketch = GradientSketch(self.layers, self.device, self.seed)
        self.centres: Tensor | None = None  # (K, S), in sketches; None before the first update
        self._since_update = self.every  # the first update is due at once

    def draw(self, generator: torch.Generator) -> Draw:
        numbers, weights = stratified_draw(self.assignments, self.batch_size, generator)
        return self.drawn(numbers, generator, weights)

    def trained_layers(self) -> dict[str, nn.Module]:
        """Return the layers that have not stopped."""
        return {name: layer for name, layer in self.layers.items() if layer.weight.requires_grad}

    @property
    def is_about_to_pass(self) -> bool:
        return self.mode == "full" and self._since_update >= self.every

    def refresh(self) -> None:
        if self.is_about_to_pass:
            self.update()
        self._since_update += 1

    def update(self) -> None:
        """Look at all samples ``iterations`` times, and cluster them anew."""
        generator = self.generator(purpose=1)
        for _ in range(self.iterations):
            self.assignments, _ = self._pass(generator, weighted=True)
        self._since_update = 0

    def _pass(self, generator: torch.Generator, *, weighted: bool) -> tuple[Tensor, Tensor]:
        """Assign all samples once, and move the centres; return the assignments and each sample's own distance."""
        counts = np.zeros(self.clusters, dtype=np.int64) if weighted else None
        sums: CentreSums | None = None
        assignments = torch.empty(self.data.count, dtype=torch.int64)
        own = torch.empty(self.data.count, dtype=torch.float64)
        for numbers, points in self._all_points(generator):
            sums = sums or CentreSums(self._known_centres())
            table = self._distances(points)
            chosen = torch.from_numpy(assign(table, counts))
            assignments[numbers] = chosen
            own[numbers] = torch.from_numpy(table)[torch.arange(len(chosen)), chosen]
            sums.add(points, chosen.to(self.device))
        assert sums is not None, "data without samples"
        self.centres = sums.centres()
        if weighted:
            self._fill(assignments, generator)
        return assignments, own

    def _all_points(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers and sketches of all samples in random order; without centres, set them from the first ones."""
        waiting: list[tuple[Tensor, Tensor]] = []
        order = torch.randperm(self.data.count, generator=generator).split(self.batch_size)
        for place, numbers in enumerate(order):
            waiting.append((numbers, self._points(self.drawn(numbers, generator))))
            enough = sum(len(each) for each, _ in waiting) >= FIRST_POINTS * self.clusters
            if self.centres is None and (enough or place == len(order) - 1):
                self.centres = first_centres(torch.cat([p for _, p in waiting]), self.clusters, generator)
            if self.centres is not None:
                yield from waiting
                waiting = []

    def _fill(self, assignments: Tensor, generator: torch.Generator) -> None:
        """Fill empty clusters, in place; their centres begin at those that they were split from."""
        for k, source in split_largest(assignments, self.clusters, generator):
            self._known_centres()[k] = self._known_centres()[source]

    def _points(self, draw: Draw) -> Tensor:
        """Return the sketch of each sample's own gradient; one pass without side effects or weights' gradients."""
        key = ("clusters", shapes_of(draw.batch))
        with self.pass_on(draw) as evaluate, LayerSignals(self.trained_layers()) as recorded:
            with self.meter.forward(key):
                loss = evaluate({})
            if not recorded.edges:
                raise UserError("gradient clustering needs a layer that still trains, got none: end it before all stop")
            with self.meter.backward(key):
                torch.autograd.grad(loss, recorded.edges, allow_unused=True)
            points, flops = self.sketch.of(recorded, draw.size, float(draw.size))
        self.meter.add(flops)
        return points

    def _distances(self, points: Tensor) -> NDArray[np.float64]:
        self.meter.add(3 * points.numel() * self.clusters)
        return squared_distances(points, self._known_centres()).double().cpu().numpy()

    def _known_centres(self) -> Tensor:
        assert self.centres is not None
        return self.centres

    def rows(self, draw: Draw) -> Any:
        if self.mode == "online" and self._since_update >= self.every:
            return WatchedRows(self.model, draw, self.trained_layers())
        return super().rows(draw)

    def observe(self, draw: Draw, rows: Any) -> None:
        if not isinstance(rows, WatchedRows) or draw.numbers is None:
            return
        assert draw.weights is not None
        generator = self.generator(purpose=1)
        # The pass was on the mean of the weighted losses.
        points, flops = self.sketch.of(rows.layers, draw.size, draw.size / draw.weights)
        self.meter.add(flops)
        if self.centres is None:
            self.centres = first_centres(points, self.clusters, generator)
        counts = torch.bincount(self.assignments, minlength=self.clusters)
        # A sample is assigned as if it were not there yet; each counts once, however often it was drawn.
        numbers, places = np.unique(draw.numbers.numpy(), return_index=True)
        drawn = torch.from_numpy(numbers)
        counts -= torch.bincount(self.assignments[drawn], minlength=self.clusters)
        points = points[torch.from_numpy(places).to(self.device)]
        chosen = torch.from_numpy(assign(self._distances(points), counts.numpy()))
        self.assignments[drawn] = chosen
        sums = CentreSums(self.centres)
        sums.add(points, chosen.to(self.device))
        self.centres = sums.centres(self.decay)
        self._fill(self.assignments, generator)
        self._since_update = 0

    def inspect(self, *, iterations: int = 5, examples: int = 6) -> list[GradientCluster]:
        """Return clusters of equal gradients, the largest first: each sample with its nearest centre, unweighted.

        The method's own clusters, made for low variance, split large groups; these do not. It takes ``iterations``
        passes over the data, >= 1, and names so many ``examples`` nearest to each centre. Nothing is changed.
        """
        kept, self.centres = self.centres, None
        generator = self.generator(purpose=2)
        try:
            with self.meter.apart():
                for _ in range(iterations):
                    assignments, own = self._pass(generator, weighted=False)
        finally:
            self.centres = kept
        found = []
        for k in assignments.unique().tolist():
            members = (assignments == k).nonzero().flatten()
            nearest = members[own[members].argsort()[:examples]].tolist()
            spread = float(own[members].mean())
            found.append(GradientCluster(size=len(members), spread=spread, examples=tuple(nearest)))
        return sorted(found, key=lambda cluster: -cluster.size)

    def state_dict(self) -> dict[str, Any]:
        centres = None if self.centres is None else self.centres.clone()
        own = {"assignments": self.assignments.clone(), "centres": centres, "since_update": self._since_update}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._since_update = int(state["since_update"])
        self.assignments = state["assignments"].clone()
        self.centres = None if state["centres"] is None else state["centres"].to(self.device)
