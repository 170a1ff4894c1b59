"""Small convolutional networks and their data, the same every time."""

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


class Shuffled(nn.Module):
    """Registers its norms first, then the convolutions in reverse; runs conv0 norm0 conv1 norm1 conv2 norm2 head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv0 = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip((self.conv0, self.conv1, self.conv2), self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


#: Names of its parameters in the order in which they run.
EXECUTION = [
    *["conv0.weight", "conv0.bias", "norms.0.weight", "norms.0.bias"],
    *["conv1.weight", "conv1.bias", "norms.1.weight", "norms.1.bias"],
    *["conv2.weight", "conv2.bias", "norms.2.weight", "norms.2.bias"],
    *["head.weight", "head.bias"],
]
