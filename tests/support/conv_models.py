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
