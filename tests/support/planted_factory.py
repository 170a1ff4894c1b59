"""A factory of a training whose quality is planted: ``make``.

Only weight decay moves the weights, so a layer's size tells how many steps it has trained, and accuracy is a function
of these alone, with noise that differs between seeds, splits and outcomes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES, LAYERS = 8, 6, 5
STEPS = EPOCHS * BATCHES
_RATE, _DECAY = 0.1, 0.1


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])
        for layer in self.layers:
            nn.init.ones_(layer.weight)
        self.register_buffer("draw", torch.randint(0, 10**6, (1,)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) / 16
        return x


def lost(steps: list[int], first: float, last: float) -> float:
    """Return what is lost where the layers have trained so many steps: ``first`` and ``last`` if those trained none."""
    return first * (1 - steps[0] / STEPS) + last * (1 - steps[-1] / STEPS)


def make(first: float = 0.0, last: float = 0.0, noise: float = 0.001) -> dict[str, Any]:
    """Return the parts; for ``first`` and ``last`` see `lost`, ``noise`` is a standard deviation of the accuracy."""

    def evaluate(model: Any, batches: Iterable[Any], device: Any) -> dict[str, float]:
        sizes = [float(layer.weight.double().mean()) for layer in model.layers]
        steps = [round(math.log(size) / math.log(1 - _RATE * _DECAY)) for size in sizes]
        seen = sum(float(x[0, 0]) + 0 * float(model(x).sum()) for x, _ in batches)
        key = hashlib.sha256(f"{int(model.draw)} {steps} {seen:.3f}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
        return {"accuracy": 0.9 - lost(steps, first, last) + noise * float(torch.randn((), generator=generator))}

    def data(seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(8 * BATCHES, 16, generator=generator), torch.zeros(8 * BATCHES, 16))

    return {
        "model": Chain,
        "train": DataLoader(data(0), batch_size=8, shuffle=True),
        "validation": DataLoader(data(1), batch_size=8),
        "test": DataLoader(data(2), batch_size=8),
        "loss": lambda model, batch: 1e-9 * (model(batch[0]) - batch[1]).square().mean(),
        "evaluate": evaluate,
        "metric": "accuracy",
        "direction": "max",
        "epochs": EPOCHS,
        "optimizer": lambda named: torch.optim.SGD(named, lr=_RATE, weight_decay=_DECAY),
        "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    }
