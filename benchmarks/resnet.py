"""ResNet-18 for 32x32 images, as the benchmarks train it (He et al. 2016, with the 3x3 stem that CIFAR needs)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.gradskip import Settings

#: Convolutions: the stem's, two in each of eight blocks, three in shortcuts. What "layers" counts.
LAYERS = 20


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
    """Stem, eight blocks, head."""
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


def stop_share(model: nn.Module, share: float) -> Settings:
    """Settings that stop this share of the layers in the first step: in execution order, with their norms."""
    if share == 0:
        return Settings(start_thr=-1)
    convolutions = [n for n, p in enumerate(model.parameters()) if p.dim() == 4]
    assert len(convolutions) == LAYERS
    last = convolutions[round(share * LAYERS) - 1]
    return Settings(stop_layer_num=(last,), stop_layer_itr=(0,), whole_units=True)
