"""Every class of learning rate schedule with arguments, and an optimizer to schedule."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

#: Every class that a schedule can hold, with arguments under which something happens within 30 epochs.
TORCH = [
    ("StepLR", {"step_size": 7, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [3, 11, 11, 20], "gamma": 0.3}),
    ("ConstantLR", {"factor": 0.25, "total_iters": 6}),
    ("LinearLR", {"start_factor": 0.1, "end_factor": 0.8, "total_iters": 9}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("PolynomialLR", {"total_iters": 12, "power": 2.0}),
    ("CosineAnnealingLR", {"T_max": 13, "eta_min": 1e-3}),
    ("CosineAnnealingWarmRestarts", {"T_0": 4, "T_mult": 2, "eta_min": 1e-4}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4, "step_size_down": 3, "mode": "triangular2"}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 5, "cycle_momentum": False}),
    ("OneCycleLR", {"max_lr": 0.3, "total_steps": 30}),
]  # fmt: skip


def sgd(*rates: float, momentum: float = 0.9) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return SGD(groups, lr=1.0, momentum=momentum)


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


PLATEAU = {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 0.02, "threshold": 1e-3}
