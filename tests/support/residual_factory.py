"""A factory of a small residual network, no nn.Sequential, whose forward is a loop over its blocks: ``make``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

#: Samples; a batch has 16 of them.
COUNT = 40


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.drop(self.norm(self.conv(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.head = nn.Linear(8, 3)
        self.mix = torch.eye(8)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = torch.einsum("bchw,cd->bdhw", block(x), self.mix)  # what no module computes runs in each step
        return self.head(x.mean((2, 3)))


class Noisy(Dataset[Any]):
    """Samples that are augmented from a draw on."""

    def __init__(self, data: TensorDataset, begin: int) -> None:
        self._data, self._left = data, begin

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        image, label = self._data[number]
        self._left -= 1
        return (image if self._left >= 0 else image + 0.1 * torch.randn_like(image)), label


class Augmented(Dataset[Any]):
    """Samples mirrored by torch's generator, shifted by numpy's and made brighter by Python's."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        image, label = self._data[number]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image.roll(int(np.random.randint(3)), 1) + random.random(), label


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (COUNT,), generator=generator)
    return TensorDataset(torch.randn(COUNT, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels)


def make(how: str = "shuffled") -> dict[str, Any]:
    """Return the parts, with training data of a kind."""
    train: Any = DataLoader(data(), batch_size=16, shuffle=True)
    more: dict[str, int] = {}
    if how == "workers":
        train = DataLoader(data(), batch_size=16, shuffle=True, num_workers=1, generator=torch.Generator())
    elif how == "list":
        train = [*DataLoader(data(), batch_size=16)]
    elif how == "doubled":
        train = DataLoader(data(), batch_size=8, collate_fn=lambda items: default_collate(items + items))
    elif how == "padded":
        train = DataLoader(data(), batch_size=16, collate_fn=_padded)
    elif how in ("noisy", "noisy later"):
        train = DataLoader(Noisy(data(), 0 if how == "noisy" else 100), batch_size=16, shuffle=True)
    elif how.startswith("augmented"):
        train = DataLoader(Augmented(data()), batch_size=16, shuffle=True, num_workers=how == "augmented by workers")
        more = {"views": 2}
    elif how == "stream":
        train = _Stream()
    model = _trained if how == "trained" else Network
    parts = {"model": model, "train": train, "validation": DataLoader(data(), batch_size=COUNT), "epochs": 4}
    return {**more, **parts}


def _padded(items: list[Any]) -> Any:
    """Return a batch whose rows depend on what is in it."""
    images, labels = default_collate(items)
    return F.pad(images, (0, len(items))), labels


def _trained() -> Network:
    """Return a network whose norms have statistics of an earlier training."""
    network = Network()
    with torch.no_grad():
        network(data().tensors[0])
    return network


class _Stream:
    def __iter__(self) -> Any:
        return iter(DataLoader(data(), batch_size=16))

    def __len__(self) -> int:
        return 3
