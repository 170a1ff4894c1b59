"""Stratified batches: unbiased in expectation, of the stated variance, reproducible."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainables.errors import UserError
from trainables.gradients import IndexedDataset, StratifiedBatches
from trainables.gradients.gradient_clustering import stratified_draw

#: Clusters of 5, 1, 0, 4 and 2 samples.
ASSIGNMENTS = torch.tensor([0, 3, 0, 1, 0, 3, 4, 3, 0, 4, 0, 3])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 8, 30])
def test_the_weighted_mean_has_the_mean_of_all_samples_as_its_expectation(batch_size: int) -> None:
    values = torch.linspace(-2, 5, len(ASSIGNMENTS), dtype=torch.float64) ** 3
    means = []
    for seed in range(4000):
        numbers, weights = stratified_draw(ASSIGNMENTS, batch_size, seeded(seed))
        means.append((weights * values[numbers]).mean())
    found = torch.stack(means)
    assert abs(float(found.mean() - values.mean())) < 4 * float(found.std()) / len(found) ** 0.5 + 1e-12


def test_one_round_has_the_variance_of_stratified_sampling() -> None:
    values = torch.linspace(-2, 5, len(ASSIGNMENTS), dtype=torch.float64) ** 3
    rounds = [stratified_draw(ASSIGNMENTS, 4, seeded(seed)) for seed in range(6000)]
    found = torch.stack([(weights * values[numbers]).mean() for numbers, weights in rounds]).var()
    parts = [values[k == ASSIGNMENTS] for k in (0, 1, 3, 4)]
    expected = sum(len(p) ** 2 * float(p.var(correction=0)) for p in parts) / len(values) ** 2
    assert float(found) == pytest.approx(expected, rel=0.08)


def test_a_batch_has_each_cluster_in_turn_and_its_samples_once_as_long_as_it_has_some() -> None:
    numbers, weights = stratified_draw(ASSIGNMENTS, 8, seeded(3))
    clusters = ASSIGNMENTS[numbers]
    assert sorted(clusters[:4].tolist()) == sorted(clusters[4:].tolist()) == [0, 1, 3, 4]
    of_three = numbers[clusters == 3]
    assert len(set(of_three.tolist())) == 2
    assert torch.equal(weights, 4 * torch.bincount(ASSIGNMENTS)[clusters] / 12)
    assert torch.equal(stratified_draw(ASSIGNMENTS, 8, seeded(3))[0], numbers)


def test_batches_for_a_loader_of_an_indexed_data_set() -> None:
    inputs = torch.arange(12.0).view(12, 1)
    batches = StratifiedBatches(ASSIGNMENTS, batch_size=5, seed=1)
    loader = DataLoader(IndexedDataset(TensorDataset(inputs, inputs + 1)), batch_sampler=batches)
    assert len(loader) == 3
    first = [numbers for numbers, (x, y) in loader if torch.equal(x[:, 0], numbers.float()) and torch.equal(y, x + 1)]
    assert len(first) == 3
    again = [numbers for numbers, _ in loader]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    batches.set_epoch(1)
    assert any(not torch.equal(a, b[0]) for a, b in zip(first, loader, strict=True))
    counts = torch.bincount(ASSIGNMENTS)
    assert torch.allclose(batches.weights(first[0]), 4 * counts[ASSIGNMENTS[first[0]]] / 12)


def test_batches_without_samples_are_refused() -> None:
    with pytest.raises(UserError, match="need samples and a batch_size >= 1, got 0 and 4"):
        StratifiedBatches(torch.empty(0, dtype=torch.int64), batch_size=4)
