"""Gradient clustering: samples with similar gradients form clusters, and every batch has samples of all of them.

Shapes: N samples; K clusters; B samples of a batch; assignments (N,) int64.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.errors import UserError, unknown_name
from trainables.gradients.cluster_assignment import (
    CentreSums,
    assign,
    first_centres,
    split_largest,
    squared_distances,
)
from trainables.gradients.gradient_method import Draw, GradientMethod
from trainables.gradients.gradient_sketch import GradientSketch
from trainables.gradients.layer_signals import LayerSignals, check_some, treatable_layers
from trainables.gradients.row_proof import PROVE_EVERY, layers_of_samples
from trainables.gradients.stratified_sampling import stratified_draw
from trainables.gradients.variance_fields import CLUSTER_MODES, ONLINE_CLUSTER_EVERY, usual_cluster_interval
from trainables.gradients.watched_rows import WatchedRows
from trainables.workloads.batch_shapes import shapes_of

#: Samples for each cluster among which the first centres are chosen.
FIRST_POINTS = 8


@dataclass(frozen=True, kw_only=True)
class GradientCluster:
    """Samples that share a gradient."""

    size: int
    """Samples."""
    spread: float
    """Mean squared distance of their gradients from the centre."""
    examples: tuple[int, ...]
    """Numbers of the samples nearest to the centre, the nearest first."""


class GradientClustering(GradientMethod):
    """Stratified batches over clusters of per-sample gradients of linear and convolution layers.

    The estimate is unbiased whatever the clusters are: weights are M N_k / N (`stratified_sampling`).

    Source: Faghri et al., arXiv:2007.04532, 2020, section 3. Other than the published code, a pass counts N_k from 0
    on (with the counts of the pass before, the variance was 16 times SGD's), and centres are those of sketches
    (`gradient_sketch`), not outer products of mean inputs and mean output gradients: of a convolution, whose gradients
    are sums over places, equal gradients would not be at distance 0.

    Args:
        clusters: K, in 1..N.
        mode: ``full``: passes over all samples, now and then; ``online``: each update looks at the batch that is
            trained, at less than a gradient's cost.
        every: iterations from one update to the next, >= 1. None: `usual_cluster_interval`, with which a step costs
            less than two plain ones; online `ONLINE_CLUSTER_EVERY`.
        iterations: passes of a full update, >= 1; each costs about a pass over the data.
        decay: of the centres in online mode, in [0, 1).

    Raises:
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
        if not 1 <= clusters <= self.data.count:
            raise UserError(f"clusters must be in 1..{self.data.count}, the samples there are, got {clusters!r}")
        if mode not in CLUSTER_MODES:
            raise unknown_name("mode of gradient clustering", mode, CLUSTER_MODES)
        for option, value in (("every", every), ("iterations", iterations)):
            if value is not None and value < 1:
                raise UserError(f"{option} must be an integer >= 1, got {value!r}")
        if not 0 <= decay < 1:
            raise UserError(f"decay must be in [0, 1), got {decay!r}")
        self.clusters, self.mode, self.iterations, self.decay = clusters, mode, iterations, decay
        batches = -(-self.data.count // self.batch_size)
        self.every = every or (usual_cluster_interval(batches, iterations) if mode == "full" else ONLINE_CLUSTER_EVERY)
        self.layers = treatable_layers(self.model)
        check_some(self.layers, "gradient clustering", self.model)
        generator = torch.Generator().manual_seed(self.seed)
        # Before the first update, clusters are random: stratified sampling is then no worse than plain.
        self.assignments = torch.randperm(self.data.count, generator=generator) % clusters
        """(N,), the cluster of each sample."""
        self.sketch = GradientSketch(self.layers, self.device, self.seed)
        self.centres: Tensor | None = None
        """(K, S), in sketches; None before the first update."""
        self._since_update = self.every  # the first update is due at once
        self._warned = False
        self._prove_at = 0

    def draw(self, generator: torch.Generator) -> Draw:
        numbers, weights = stratified_draw(self.assignments, self.batch_size, generator)
        return self.drawn(numbers, generator, weights)

    @property
    def is_about_to_pass(self) -> bool:
        return self.mode == "full" and self._since_update >= self.every

    def refresh(self) -> None:
        trained = self._trained_layers()
        if trained and self.iteration >= self._prove_at:
            others = trained.keys() - layers_of_samples(self, trained).keys()
            self.layers = {name: layer for name, layer in self.layers.items() if name not in others}
            self._prove_at = self.iteration + PROVE_EVERY
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
            assert self.centres is not None
            sums = sums or CentreSums(self.centres)
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
        with self.unchanged_model():
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
        assert self.centres is not None
        filled = split_largest(assignments, self.clusters, generator)
        for k, source in filled:
            self.centres[k] = self.centres[source]
        if filled and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(filled)} of {self.clusters} gradient clusters were empty, and got half of the largest each: "
                "fewer clusters do as well here",
                stacklevel=3,
            )

    def _points(self, draw: Draw) -> Tensor:
        """Return the sketch of each sample's own gradient; one pass without side effects or weights' gradients."""
        key = ("clusters", shapes_of(draw.batch))
        with self.pass_on(draw) as evaluate, LayerSignals(self._trained_layers()) as recorded:
            with self.meter.forward(key):
                loss = evaluate({})
            if not recorded.edges:
                raise UserError("gradient clustering needs a layer that still trains, got none: end it before all stop")
            with self.meter.backward(key):
                torch.autograd.grad(loss, recorded.edges, allow_unused=True)
            return self._sketched(recorded, draw.size, float(draw.size))

    def _sketched(self, recorded: LayerSignals, samples: int, scale: Tensor | float) -> Tensor:
        points, flops = self.sketch.of(recorded, samples, scale)
        self.meter.add(flops)
        return points

    def _distances(self, points: Tensor) -> NDArray[np.float64]:
        assert self.centres is not None
        self.meter.add(3 * points.numel() * len(self.centres))
        return squared_distances(points, self.centres).double().cpu().numpy()

    def _trained_layers(self) -> dict[str, Any]:
        return {name: layer for name, layer in self.layers.items() if layer.weight.requires_grad}

    def rows(self, draw: Draw) -> Any:
        if self.mode == "online" and self._since_update >= self.every:
            return WatchedRows(self.model, draw, self._trained_layers())
        return super().rows(draw)

    def observe(self, draw: Draw, rows: Any) -> None:
        if not isinstance(rows, WatchedRows) or draw.numbers is None:
            return
        assert draw.weights is not None
        generator = self.generator(purpose=1)
        # The pass was on the mean of the weighted losses.
        points = self._sketched(rows.layers, draw.size, draw.size / draw.weights)
        if self.centres is None:
            self.centres = first_centres(points, self.clusters, generator)
        counts = torch.bincount(self.assignments, minlength=self.clusters)
        # A sample is assigned as if it were not there yet; each counts once, however often it was drawn.
        numbers, places = np.unique(draw.numbers.numpy(), return_index=True)
        drawn = torch.from_numpy(numbers)
        counts -= torch.bincount(self.assignments[drawn], minlength=self.clusters)
        at = torch.from_numpy(places).to(self.device)
        chosen = torch.from_numpy(assign(self._distances(points[at]), counts.numpy()))
        self.assignments[drawn] = chosen
        sums = CentreSums(self.centres)
        sums.add(points[at], chosen.to(self.device))
        self.centres = sums.centres(self.decay)
        self._fill(self.assignments, generator)
        self._since_update = 0

    def inspect(self, *, iterations: int = 5, examples: int = 6) -> list[GradientCluster]:
        """Return clusters of equal gradients, the largest first: each sample with its nearest centre, unweighted.

        The method's own clusters, made for low variance, split large groups; these do not. Nothing is changed.

        Args:
            iterations: passes over the data, >= 1.
            examples: samples nearest to the centre that are named.
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
        for k in range(self.clusters):
            members = (assignments == k).nonzero().flatten()
            if len(members):
                nearest = members[own[members].argsort()[:examples]].tolist()
                spread = float(own[members].mean())
                found.append(GradientCluster(size=len(members), spread=spread, examples=tuple(nearest)))
        return sorted(found, key=lambda cluster: -cluster.size)

    def extra_state(self) -> dict[str, Any]:
        return {
            "assignments": self.assignments.clone(),
            "centres": None if self.centres is None else self.centres.clone(),
            "since_update": self._since_update,
            "layers": list(self.layers),
            "prove_at": self._prove_at,
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.assignments = state["assignments"].clone()
        self.centres = None if state["centres"] is None else state["centres"].to(self.device)
        self._since_update = int(state["since_update"])
        self.layers = {name: layer for name, layer in self.layers.items() if name in state.get("layers", self.layers)}
        self._prove_at = int(state.get("prove_at", 0))
