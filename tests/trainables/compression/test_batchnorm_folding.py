"""Folding batch norm into convolutions: which belong together, and the function stays the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.compression.policies import batchnorms_after


class Crossed(nn.Module):
    """Modules in another order than that of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_b, self.norm_a = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.a, self.b, self.alone = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.late = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(self.a(x)).relu()
        x = self.norm_b(self.b(x))
        return self.late(self.alone(x).relu())


def test_pairs_follow_the_data_and_nothing_between() -> None:
    model = Crossed()
    assert batchnorms_after(model, lambda m: m(torch.ones(1, 3, 8, 8))) == {"a": "norm_a", "b": "norm_b"}
