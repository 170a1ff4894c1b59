"""A workload without norms and dropout, whose gradients on a whole batch are those of its parts together.

Batches of 7 rows, the last of one: two processes get four and three, and one of them nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from tiny_workload import Tiny, _data
from torch import nn
from torch.optim import SGD, Optimizer

from trainables.registry import WORKLOADS, Entry
from trainables.workloads.base import Batch

SAMPLES, BATCH_SIZE = 50, 7


class Plain(Tiny):
    """Three convolutions."""

    name = "plain"

    @property
    def steps_per_epoch(self) -> int:
        return -(-SAMPLES // BATCH_SIZE)

    def make_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inside, outside in ((1, 4), (4, 4), (4, 6)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=0.05, momentum=0.9, weight_decay=0.01)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        images, labels = _data(0, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for part in order.split(BATCH_SIZE):
            yield images[part], labels[part]


def register() -> None:
    """Registers it for good, in a process of a test's own."""
    WORKLOADS["plain"] = Entry(home=f"{__name__}:Plain", default_epochs=3, description="a test's")
