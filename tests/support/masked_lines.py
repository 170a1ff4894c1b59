"""A linear model of a few weights, and what they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

START = [0.9, -0.4, 0.3, 1.5]


def line(values: list[float] = START) -> nn.Linear:
    """y = w x with these w, shape (1, n), in double precision."""
    model = nn.Linear(len(values), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values], dtype=torch.float64))
    return model


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def weights_of(model: nn.Module) -> list[float]:
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]
