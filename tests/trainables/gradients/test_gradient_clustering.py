"""Gradient clustering: sketches against per-sample gradients, clusters, variance, resumption, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampled_nets import cross_entropy as loss
from sampled_nets import each_gradient
from thorough import rest_thorough
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradients import GradientClustering, GradientMethod
from trainables.gradients.gradient_clustering import (
    CentreSums,
    GradientSketch,
    assign,
    split_largest,
    squared_distances,
    stratified_draw,
)
from trainables.gradients.layer_signals import LayerSignals, treatable_layers
from trainables.workloads.digits import digit_splits


def small(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, outputs)
    )


def images(count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return x, torch.randint(0, classes, (count,), generator=generator)


def digits_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(1, 8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(1, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def sample_gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Weights' gradients of each sample's own loss, one backward pass each: (B, P)."""
    each = each_gradient(model, batch)
    return torch.stack([torch.cat([g.flatten() for n, g in one.items() if n.endswith("weight")]) for one in each])


def sketches(model: nn.Module, batch: tuple[Tensor, ...], side: int, seed: int = 0) -> Tensor:
    layers = treatable_layers(model)
    with LayerSignals(layers) as recorded:
        loss(model, batch).backward()
        sketch = GradientSketch(layers, torch.device("cpu"), seed, side)
        return sketch.of(recorded, len(batch[0]), float(len(batch[0])))[0]


def test_a_sketch_of_whole_sides_is_the_gradient_itself() -> None:
    model, batch = small(), images(6)
    assert torch.allclose(sketches(model, batch, side=64), sample_gradients(model, batch), atol=1e-6)


@pytest.mark.slow
@pytest.mark.thorough
def test_sketches_keep_squared_distances_on_average_and_zero_distances_exactly() -> None:
    model, (x, y) = small(), images(6)
    batch = (torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))
    exact = sample_gradients(model, batch)
    wanted = torch.cdist(exact, exact).square()
    found = torch.stack([torch.cdist(s, s).square() for s in (sketches(model, batch, 4, seed) for seed in range(600))])
    error = 4 * found.std(0) / 600**0.5
    assert bool(((found.mean(0) - wanted).abs() <= error + 1e-4 * wanted.max()).all())
    assert float(found[:, 0, 6].max()) < 1e-9 * float(wanted.max())


def test_assignment_weighs_distances_by_the_running_count() -> None:
    table = np.array([[1.0, 1.5], [1.0, 1.5], [1.0, 1.5], [9.0, 0.1]])
    counts = np.zeros(2, dtype=np.int64)
    # (N_k + 1) d: 1 < 1.5; 2 > 1.5; 2 < 3; 27 > 0.2.
    assert assign(table, counts).tolist() == [0, 1, 0, 1]
    assert counts.tolist() == [2, 2]
    assert assign(table, None).tolist() == [0, 0, 0, 1]


def test_centres_are_means_and_empty_clusters_take_half_of_the_largest() -> None:
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    before = torch.tensor([[9.0, 9.0], [0.0, 1.0], [4.0, 4.0]])
    sums = CentreSums(before)
    sums.add(points, torch.tensor([0, 0, 1]))
    assert torch.equal(sums.centres(), torch.tensor([[2.0, 0.0], [0.0, 5.0], [4.0, 4.0]]))
    assert torch.allclose(sums.centres(0.5), torch.tensor([[5.5, 4.5], [0.0, 3.0], [4.0, 4.0]]))
    assert torch.allclose(squared_distances(points, before)[2], torch.tensor([97.0, 16.0, 17.0]))
    assignments = torch.tensor([0, 0, 0, 0, 0, 2])
    done = split_largest(assignments, 4, torch.Generator().manual_seed(0))
    assert done == [(1, 0), (3, 0)]
    assert torch.bincount(assignments, minlength=4).tolist() == [2, 2, 1, 1]
    few = torch.tensor([0, 1])
    assert split_largest(few, 4, torch.Generator().manual_seed(0)) == []


def test_equal_gradients_share_a_cluster() -> None:
    """Three groups of copies: unweighted clusters are the groups, with examples of them."""
    x, y = images(3)
    order = torch.tensor([0] * 20 + [1] * 9 + [2] * 5)[torch.randperm(34, generator=torch.Generator().manual_seed(3))]
    model = small()
    method = GradientClustering(model, loss, (x[order], y[order]), batch_size=8, clusters=3)
    before = [t.clone() for t in model.state_dict().values()]
    found = method.inspect(iterations=3, examples=4)
    assert [cluster.size for cluster in found] == [20, 9, 5]
    for cluster, group in zip(found, (0, 1, 2), strict=True):
        assert {int(order[number]) for number in cluster.examples} == {group}
        assert cluster.spread < 1e-6
        assert len(cluster.examples) == 4
    assert method.centres is None  # nothing of the method itself has changed
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def variance(method: GradientMethod, samples: int) -> tuple[float, Tensor]:
    rows = []
    for seed in range(samples):
        found = method.gradient(method.draw(torch.Generator().manual_seed(seed)))
        rows.append(torch.cat([g.flatten() for g in found.values()]).double())
    table = torch.stack(rows)
    return float(table.var(0).sum()), table.mean(0)


def trained(x: Tensor, y: Tensor, steps: int = 40) -> nn.Module:
    model = digits_net()
    method = GradientMethod(model, loss, (x, y), torch.optim.SGD(model.parameters(), lr=0.1), batch_size=32)
    for _ in range(steps):
        method.step()
    return model


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "online"])
def test_with_half_of_the_data_duplicated_the_variance_is_at_most_0_4_of_sgd(mode: str) -> None:
    x, y = (part[:400] for part in digit_splits()["train"])
    x, y = torch.cat([x[:200], x[:2].repeat(100, 1, 1, 1)]), torch.cat([y[:200], y[:2].repeat(100)])
    model = trained(x, y)
    data: Any = (x, y)
    sgd, _ = variance(GradientMethod(model, loss, data, batch_size=32), 300)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    every, steps = (5, 6) if mode == "full" else (1, 200)  # online, a sample moves only when it is drawn
    method = GradientClustering(model, loss, data, still, batch_size=32, mode=mode, every=every, decay=0.9)
    for _ in range(steps):
        method.step()
    found, mean = variance(method, 300)
    assert found <= 0.4 * sgd
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, data), list(model.parameters()))]).double()
    # Unbiased: the mean of 300 estimates is within four standard errors of the gradient of all samples.
    assert float((mean - exact).square().sum()) < 16 * found / 300


@pytest.mark.slow
@pytest.mark.thorough
def test_sgd_itself_has_the_variance_of_drawing_without_replacement() -> None:
    x, y = images(20)
    model = small().double()
    batch = (x.double(), y)
    rows = [torch.cat([g.flatten() for g in one.values()]) for one in each_gradient(model, batch)]
    each = torch.stack(rows).var(0).sum()
    found, _ = variance(GradientMethod(model, loss, batch, batch_size=5), 1500)
    assert found == pytest.approx(float(each) / 5 * (1 - 5 / 20), rel=0.06)


def test_models_that_it_cannot_look_at() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:  # (B, T, 4): places first inside
            return self.linear(x.transpose(0, 1)).mean(0)

    with pytest.raises(UserError, match="needs linear or ungrouped convolution layers"):
        GradientClustering(nn.Sequential(nn.Flatten(), nn.LayerNorm(64)), loss, images(40), batch_size=8)
    data = (torch.randn(40, 5, 4), torch.zeros(40, dtype=torch.int64))
    with pytest.raises(UserError, match=r"samples' dimension first, got 5 rows in layer linear for a batch of 8"):
        GradientClustering(Sequences(), loss, data, batch_size=8).update()
    stopped = small()
    method = GradientClustering(stopped, loss, images(40), batch_size=8)
    for layer in method.layers.values():
        layer.weight.requires_grad_(False)
    with pytest.raises(UserError, match="needs a layer that still trains"):
        method.update()


#: Clusters of 5, 1, 0, 4 and 2 samples.
ASSIGNMENTS = torch.tensor([0, 3, 0, 1, 0, 3, 4, 3, 0, 4, 0, 3])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("batch_size", rest_thorough([3, 8]))
def test_the_weighted_mean_has_the_mean_of_all_samples_as_its_expectation(batch_size: int) -> None:
    values = torch.linspace(-2, 5, len(ASSIGNMENTS), dtype=torch.float64) ** 3
    means = []
    for seed in range(1500):
        numbers, weights = stratified_draw(ASSIGNMENTS, batch_size, seeded(seed))
        means.append((weights * values[numbers]).mean())
    found = torch.stack(means)
    assert abs(float(found.mean() - values.mean())) < 4 * float(found.std()) / len(found) ** 0.5 + 1e-12


def test_one_round_has_the_variance_of_stratified_sampling() -> None:
    values = torch.linspace(-2, 5, len(ASSIGNMENTS), dtype=torch.float64) ** 3
    rounds = [stratified_draw(ASSIGNMENTS, 4, seeded(seed)) for seed in range(2000)]
    found = torch.stack([(weights * values[numbers]).mean() for numbers, weights in rounds]).var()
    parts = [values[k == ASSIGNMENTS] for k in (0, 1, 3, 4)]
    expected = sum(len(p) ** 2 * float(p.var(correction=0)) for p in parts) / len(values) ** 2
    assert float(found) == pytest.approx(expected, rel=0.13)


def test_a_batch_has_each_cluster_in_turn_and_its_samples_once_as_long_as_it_has_some() -> None:
    numbers, weights = stratified_draw(ASSIGNMENTS, 8, seeded(3))
    clusters = ASSIGNMENTS[numbers]
    assert sorted(clusters[:4].tolist()) == sorted(clusters[4:].tolist()) == [0, 1, 3, 4]
    of_three = numbers[clusters == 3]
    assert len(set(of_three.tolist())) == 2
    assert torch.equal(weights, 4 * torch.bincount(ASSIGNMENTS)[clusters] / 12)
    assert torch.equal(stratified_draw(ASSIGNMENTS, 8, seeded(3))[0], numbers)
