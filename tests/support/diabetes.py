"""A factory of a regression: scikit-learn's diabetes data on three linear layers, by the mean squared error."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def make() -> dict[str, Any]:
    """Return the parts; targets are in standard deviations."""
    inputs, targets = (
        torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True, scaled=False)
    )
    inputs, targets = (inputs - inputs.mean(0)) / inputs.std(0), (targets - targets.mean()) / targets.std()
    splits = random_split(TensorDataset(inputs, targets), [302, 70, 70])
    train, validation, test = (DataLoader(split, batch_size=32, shuffle=split is splits[0]) for split in splits)
    return {
        "model": lambda: nn.Sequential(
            nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)
        ),
        "train": train, "validation": validation, "test": test, "epochs": 6, "metric": "val_loss",
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.02, momentum=0.9),
    }  # fmt: skip
