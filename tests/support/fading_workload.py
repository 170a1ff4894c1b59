"""A workload that the more training, the worse it gets, so that settings which save more are ahead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def _data(seed: int, count: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator) + labels[:, None], labels)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def _evaluate(model: Any, batches: Any, device: Any) -> dict[str, float]:
    """What weight decay has taken from the first layer, which is less the earlier that stops."""
    return {"lost": 1 - float(model[0].weight.square().mean().sqrt())}


def make() -> dict[str, Any]:
    """The factory."""
    return {
        "model": _model,
        "train": DataLoader(_data(0, 50), batch_size=8, shuffle=True),
        "validation": DataLoader(_data(1, 20), batch_size=8),
        "evaluate": _evaluate, "metric": "lost", "direction": "min", "epochs": 12,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1),
    }  # fmt: skip
