"""ResNet-18 for 32x32 images, as the benchmarks train it (He et al. 2016, with the 3x3 stem that CIFAR needs)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Stem and two convolution layers a block: what "layers stopped" counts, in execution order.
UNITS = 9


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C', H', W')."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Sequential:
    """Stem, eight blocks, head: 10 children that stop one after the other."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks, inside = [], width
    for stage in range(4):
        for first in (True, False):
            outside = width * 2**stage
            blocks.append(Block(inside, outside, 2 if first and stage else 1))
            inside = outside
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))
    return nn.Sequential(stem, *blocks, head)


def stop_first(model: nn.Sequential, count: int) -> int:
    """The number through which a manual stop ends the first ``count`` of stem and blocks, norms included."""
    return sum(len(list(child.parameters())) for child in list(model)[:count]) - 1
