"""A workload that trains in milliseconds and whose variances fall at once, for tests of the stage tree.

Dropout draws on torch's generator in every step, so a fork that lost the generators' state would show. Adam keeps two
moments and a step count a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from trainables.registry import WORKLOADS, Entry
from trainables.workloads.base import Batch, Workload

SAMPLES, BATCH_SIZE = 60, 8
STEPS_PER_EPOCH = 8  # the last batch has 4 samples


def _data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    images = torch.randn(samples, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1)
    return images, labels


class Tiny(Workload):
    """Four convolutions with norms and dropout, strong weight decay."""

    name = "tiny"

    @property
    def steps_per_epoch(self) -> int:
        return STEPS_PER_EPOCH

    def make_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inside, outside in ((1, 4), (4, 4), (4, 6), (6, 6)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
        return nn.Sequential(*layers, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=0.1, momentum=0.9, weight_decay=0.02)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, T_max=total_steps)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        images, labels = _data(0, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for part in order.split(BATCH_SIZE):
            yield images[part], labels[part]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        images, labels = _data(1 if split == "validation" else 2, 100)
        yield from zip(images.split(32), labels.split(32), strict=True)

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float:
        images, labels = _data(1 if split == "validation" else 2, 100)
        return int((model(images.to(device)).argmax(1) == labels.to(device)).sum()) / len(labels)


class HeadFirst(nn.Module):
    """The same layers, of which the last are registered first.

    Args:
        reverse: register all in the opposite order of their execution; else the head alone before the others.
    """

    def __init__(self, *, reverse: bool) -> None:
        super().__init__()
        head, *body = reversed(list(_layers()))
        self.parts = nn.ModuleList([head, *(body if reverse else reversed(body))])
        self.order = [*range(len(body), 0, -1)] if reverse else [*range(1, len(body) + 1)]

    def forward(self, images: Tensor) -> Tensor:
        for place in [*self.order, 0]:
            images = self.parts[place](images)
        return images


def _layers() -> Iterator[nn.Module]:
    """The layers of `Tiny` in execution order, each with what belongs to it."""
    for inside, outside in ((1, 4), (4, 4), (4, 6), (6, 6)):
        yield nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())
    yield nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


class TinyAdam(Tiny):
    """The same under AdamW."""

    name = "tiny_adam"

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return AdamW(named_parameters, lr=0.02, weight_decay=0.5)


ENTRIES = {
    cls.name: Entry(home=f"{__name__}:{cls.__name__}", default_epochs=4, description="a test's")
    for cls in (Tiny, TinyAdam)
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """Registers both for a test; the first one's name."""
    for name, entry in ENTRIES.items():
        monkeypatch.setitem(WORKLOADS, name, entry)
    return Tiny.name


def register() -> None:
    """Registers both for good, in a process of a test's own."""
    WORKLOADS.update(ENTRIES)
