"""A small convolutional network and its data, the same every time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def conv_model() -> nn.Module:
    """Three convolutions with batch norm and a linear layer: 11 parameters, 4-D at 0, 4 and 7."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def conv_batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 1, 8, 8, generator=generator), torch.randint(5, (6,), generator=generator)


class Reversed(nn.Module):
    """Registers head, conv2, conv1 and runs conv1, conv2, head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.conv2, self.conv1 = nn.Linear(64, 5), nn.Conv2d(4, 4, 3), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1))


class LateNorms(nn.Module):
    """Registers its norms last, so that they are left training before stopped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv0, self.conv1 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm0 = nn.BatchNorm2d(4)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv1(torch.relu(self.norm0(self.conv0(x))))).flatten(1))
