"""A training of milliseconds and a space with many settings, for `scale.py`: `stub_training:make` and `:space`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH_SIZE = 40, 8


def make() -> dict[str, Any]:
    """Return three small layers on random numbers, whose weights shrink at once; five steps an epoch."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=generator) + labels[:, None], labels)
    return {
        "model": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)),
        "train": DataLoader(data, batch_size=BATCH_SIZE),
        "validation": DataLoader(data, batch_size=SAMPLES),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5),
    }


def space(trial: Any, context: Any) -> dict[str, Any]:
    """Ask for five variables of Gradient-Skip, two of them without a grid, so that hardly two trials are equal.

    What it saves by parameters that stop in addition is not predicted, so TPE draws every trial.
    """
    return {
        "CAC_PREFIX_AUTOGRAD": False,
        "CAC_VAR_START_ITR": trial.suggest_int("CAC_VAR_START_ITR", 0, context.total_steps // 2),
        "CAC_VAR_START_THR": trial.suggest_float("CAC_VAR_START_THR", 0.9, 1.0),
        "CAC_VAR_MT_COUNT_THR": trial.suggest_int("CAC_VAR_MT_COUNT_THR", 0, 20),
        "CAC_VAR_SLOPE_THR": trial.suggest_float("CAC_VAR_SLOPE_THR", 0.9, 1.0),
        "CAC_VAR_SAMPLES": trial.suggest_int("CAC_VAR_SAMPLES", 1, 5),
    }
