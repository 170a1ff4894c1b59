"""Small nets, data and losses for the tests of K-FAC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.gradients.kfac import KFAC

Data = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return 0.5 * (model(batch[0]) - batch[1]).square().sum() / len(batch[0])


def images(count: int = 6, classes: int = 4, dtype: torch.dtype = torch.float64) -> Data:
    return torch.randn(count, 2, 7, 6, dtype=dtype), torch.randint(classes, (count,))


def image_net(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        *([nn.BatchNorm2d(3), nn.Dropout(0.3)] if norm else []),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, (1, 2), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def table(count: int = 12, features: int = 5, outputs: int = 3, dtype: torch.dtype = torch.float64) -> Data:
    return torch.randn(count, features, dtype=dtype), torch.randint(outputs, (count,))


def table_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def method(model: nn.Module, data: Data, loss: Callable[..., Tensor] = cross_entropy, **more: Any) -> KFAC:
    """K-FAC on batches of all samples, unclipped, in the data's dtype, under SGD."""
    if data[0].is_floating_point():
        model.to(data[0].dtype)
    options: dict[str, Any] = {"batch_size": len(data[0]), "kl_clip": None, **more}
    rate = options.pop("lr", 0.1)
    return KFAC(model, loss, data, torch.optim.SGD(model.parameters(), lr=rate), **options)


class Tokens(nn.Module):
    """(B, T, I) to logits (B, T, C), or (B, C, T) as `F.cross_entropy` takes them."""

    def __init__(self, classes_first: bool) -> None:
        super().__init__()
        self.layers, self.classes_first = table_net(), classes_first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.transpose(1, 2) if self.classes_first else y


def fixed_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return table_net().double()
