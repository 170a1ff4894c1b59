"""A linear model of four weights, and a step that masks them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.compression.masks import Masks

START = [0.9, -0.4, 0.3, 1.5]


INPUTS = [[1.0, 2.0, -1.0, 0.5], [0.3, -0.7, 1.1, 2.0], [-1.2, 0.4, 0.9, 0.1]]


TARGETS = [0.7, -0.2, 1.3]


RATE, MOMENTUM = 0.1, 0.9


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


def step(model: nn.Module, masks: Masks, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """One step as a scheduler does it; the weights that the forward saw."""
    masks.apply(forward=True)
    used = weights_of(model)
    (model(row(*INPUTS[number])) - TARGETS[number]).square().sum().backward()
    masks.restore()
    optimizer.step()
    optimizer.zero_grad()
    masks.apply(forward=False)
    return used
