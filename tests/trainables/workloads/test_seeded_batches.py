"""Batches of a user's loader: their order by epoch and seed, and their structure."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainables.errors import UserError
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.seeded_loader import seeded_epoch


class Drawing(Dataset[torch.Tensor]):
    """Draws from every generator that a transform may use."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()), float(torch.rand(()))])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_an_epochs_batches_depend_on_epoch_and_seed_alone(workers: int, own: bool) -> None:
    generator = torch.Generator() if own else None
    loader = DataLoader(Drawing(), batch_size=2, shuffle=True, num_workers=workers, generator=generator)

    def epoch(number: int, seed: int) -> torch.Tensor:
        torch.manual_seed(random.randrange(1000))  # whatever the process did before
        random.seed()
        batches = []
        for batch in seeded_epoch(loader, number, seed):
            torch.rand(3), random.random(), np.random.rand()
            batches.append(batch)
        return torch.cat(batches)

    first = epoch(0, 0)
    # numpy's generator is the workers' own matter: torch seeds it in them since 1.9.
    assert torch.equal(first, epoch(0, 0))
    assert not torch.equal(first, epoch(1, 0))
    assert not torch.equal(first, epoch(0, 1))
    assert sorted(first[:, 0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_the_process_own_generators_go_on_as_if_no_loader_had_drawn() -> None:
    loader = DataLoader(Drawing(), batch_size=2, shuffle=True)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for _ in seeded_epoch(loader, 0, 0):
        pass
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert drawn == (float(torch.rand(())), random.random(), float(np.random.rand()))


def test_samplers_are_told_the_epoch() -> None:
    dataset = TensorDataset(torch.arange(12))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    orders = [torch.cat([b[0] for b in seeded_epoch(loader, epoch, 0)]).tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_batches_go_flat_and_back() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    batch = {"x": torch.ones(2), "y": [torch.zeros(1), (torch.ones(3), pair(torch.ones(4), torch.ones(5)))]}
    flat = flatten(batch)
    assert [len(t) for t in flat] == [2, 1, 3, 4, 5]
    back = unflatten(structure_of(batch), flat)
    assert back["y"][1][1].b is flat[4]
    assert isinstance(back["y"][1][1], pair)
    with pytest.raises(ValueError, match="2 tensors do not fit"):
        unflatten(structure_of([torch.ones(1)]), (torch.ones(1), torch.ones(1)))
    with pytest.raises(UserError, match=r"got int as a batch\['n'\]"):
        flatten({"n": 3})
    with pytest.raises(UserError, match="at least one tensor"):
        flatten([])
