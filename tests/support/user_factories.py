"""A module of the user's with a factory, its check and its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from trainables.workloads import build

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator) + labels[:, None], labels)

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

def parts():
    return {
        "model": model,
        "train": DataLoader(data(0, 50), batch_size=8, shuffle=True),
        "validation": DataLoader(data(1, 20), batch_size=8),
    }
"""


Write = Callable[..., str]


def check(name: str, *options: str) -> None:
    build(name, options).check(0)


def train(name: str, **more: Any) -> list[dict[str, Any]]:
    rows = []
    with TrainingRun(TrialConfig(workload=name, **{"epochs": 2, "method": "none", **more})) as run:
        while not run.finished:
            rows.append(run.train_epoch())
    return rows
