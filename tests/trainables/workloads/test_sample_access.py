"""Samples by number: against the data sets' own items, and the uniform choice of a reservoir."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainables.errors import UserError
from trainables.runtime.isolation import cpu_generators
from trainables.workloads.sample_access import TensorSamples, check_repeats, reservoir, samples_of

NUMBERS = torch.tensor([4, 0, 4, 2])


class Augmented(Dataset[tuple[Tensor, int]]):
    """Items that draw from all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.tensor([number, random.random(), np.random.rand(), float(torch.rand(()))]), number


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(3.0)

    def __len__(self) -> int:
        return 3


def as_dict(items: list[Any]) -> dict[str, Tensor]:
    return {"label": torch.tensor([y for _, y in items]), "input": torch.stack([x for x, _ in items]) * 10}


def test_batches_are_the_items_through_the_collate_function() -> None:
    rows = torch.randn(6, 3), torch.arange(6) * 7
    own = samples_of(rows)
    items = TensorDataset(*rows)
    loader = DataLoader(items, batch_size=4, collate_fn=as_dict, shuffle=True)
    batched = DataLoader(items, batch_sampler=BatchSampler(SequentialSampler(items), 3, drop_last=True))
    assert [samples_of(data).batch_size for data in (rows, items, loader, batched)] == [1, 1, 4, 3]
    source = torch.Generator()
    for data in (own, samples_of(items), samples_of(batched)):
        x, y = data.batch(NUMBERS, source)
        assert torch.equal(x, torch.stack([rows[0][n] for n in NUMBERS]))
        assert y.tolist() == [28, 0, 28, 14]
        assert data.count == 6
    y, x = samples_of(loader).batch(NUMBERS, source)
    assert torch.equal(x, rows[0][NUMBERS] * 10)
    assert y.tolist() == [28, 0, 28, 14]
    assert samples_of(own) is own


def test_augmentation_draws_from_the_given_generator_alone() -> None:
    data = samples_of(Augmented())
    before = cpu_generators()
    first = data.batch(NUMBERS, torch.Generator().manual_seed(1))
    now = cpu_generators()
    assert now[0] == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(now[1], before[1], strict=True))
    assert torch.equal(now[2], before[2])
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # no part of it
    again = data.batch(NUMBERS, torch.Generator().manual_seed(1))
    other = data.batch(NUMBERS, torch.Generator().manual_seed(2))
    assert torch.equal(first[0], again[0])
    assert bool((first[0][:, 1:] != other[0][:, 1:]).all())
    assert not torch.equal(first[0][0], first[0][2])  # one sample twice is augmented twice


def test_a_loader_of_some_samples_gives_those_alone() -> None:
    items = TensorDataset(torch.arange(10) * 3)
    data = samples_of(DataLoader(items, batch_size=2, sampler=SubsetRandomSampler([7, 2, 5])))
    assert data.count == 3
    assert data.batch(torch.arange(3), torch.Generator())[0].tolist() == [21, 6, 15]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), r"samples must have numbers, and an iterable stream \(Stream\) has none: keep .* reservoir\("),
        (DataLoader(Stream()), r"an iterable stream \(Stream\)"),
        ((x for x in torch.arange(3)), r"an iterable stream \(generator\)"),
        (
            [(torch.zeros(4), torch.zeros(4))] * 2,
            "got a list, whose entries may be samples or batches: give DataLoader",
        ),
        ({"input": torch.zeros(4)}, "got a dict, whose entries"),
        ((), "data must have samples, got none: give a DataLoader"),
        ([], "data must have samples, got none"),
        ((torch.zeros(0, 2),), "data must have samples, got none"),
        ((torch.zeros(3), torch.tensor(1.0)), "must have a row for each, got a tensor without dimensions"),
        ((torch.zeros(3), torch.zeros(4, 2)), "tensors of samples must be equally long, got 3 and 4"),
        (None, "data must be a DataLoader .*, got NoneType"),
        (
            DataLoader(TensorDataset(torch.zeros(4)), batch_size=None),
            "a DataLoader must make batches .* batch_size=None",
        ),
        (
            DataLoader(TensorDataset(torch.zeros(2)), sampler=WeightedRandomSampler([1.0, 2.0], 2)),
            "cannot be drawn by weights, too, got a DataLoader with a WeightedRandomSampler: give one with shuffle",
        ),
    ],
)
def test_data_without_numbers_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        samples_of(data)


def kept_of(count: int, most: int, seed: int) -> list[int]:
    batches = [{"x": part} for part in torch.arange(count).split(3)]
    found = reservoir(batches, most=most, seed=seed)
    assert isinstance(found, TensorSamples)
    return [int(x) for x in found.tensors[0]]


def test_reservoir_is_uniform() -> None:
    """Every sample equally often: chi-square of 11 degrees of freedom below its quantile of 1 - 1e-4, 37.4.

    The variance is that of draws without replacement: (1 - 4/12) of independent ones.
    """
    counts = Counter(x for seed in range(1500) for x in kept_of(12, 4, seed))
    expected = 1500 * 4 / 12
    chi_square = sum((counts[x] - expected) ** 2 for x in range(12)) / (expected * (1 - 4 / 12))
    assert chi_square * 11 / 12 < 37.4


def test_reservoir_is_bounded_complete_where_there_are_few_and_repeats() -> None:
    assert kept_of(5, 8, 0) == [0, 1, 2, 3, 4]
    assert kept_of(8, 8, 3) == list(range(8))
    assert len(set(kept_of(100, 7, 1))) == 7
    assert kept_of(100, 7, 1) == kept_of(100, 7, 1) != kept_of(100, 7, 2)
    pairs = reservoir(((torch.arange(4) + 4 * i, [10 * (torch.arange(4) + 4 * i)]) for i in range(9)), most=5, seed=0)
    x, y = pairs.batch(torch.arange(5), torch.Generator())
    assert torch.equal(10 * x, y)


def test_reservoir_messages() -> None:
    with pytest.raises(UserError, match="most must be an integer >= 1, got 0"):
        reservoir([], most=0, seed=0)
    with pytest.raises(UserError, match="a reservoir needs samples, got a stream without any"):
        reservoir([], most=3, seed=0)
    with pytest.raises(UserError, match=r"must have one shape, got \(\(4,\),\) and \(\(5,\),\): pad them"):
        reservoir([torch.zeros(2, 5), torch.zeros(2, 4)], most=9, seed=0)


def test_what_is_no_row_may_stand_in_a_batch_that_repeats() -> None:
    def collate(items: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack(items), "positions": torch.arange(7), "temperature": torch.tensor(2.0)}

    items: Any = [torch.full((3,), float(n)) for n in range(1, 21)]
    check_repeats(DataLoader(items, batch_size=4, collate_fn=collate))
    with pytest.raises(UserError, match="sample 0 had other values beside others"):
        check_repeats(DataLoader(items, batch_size=4, collate_fn=lambda some: torch.stack(some) * len(some) + 1))
