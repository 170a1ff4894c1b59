"""Rosenbrock's function in uncoupled pairs, a minimisation without data.

Shapes: N = 2 P numbers x of P pairs, float64.

    f(x) = sum over pairs i of b (x_{2i-1}^2 - x_{2i})^2 + (x_{2i-1} - a)^2

Its minimum is 0 at x_{2i-1} = a, x_{2i} = a^2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from trainables.gradients.normalised_sgd import NormalisedSGD
from trainables.registry import WORKLOADS
from trainables.workloads.base import Batch, Workload, check_positive

#: The start is drawn from the integers in [-START, START].
START = 10
#: Factor of each decay of the learning rate.
DECAY = 0.1


class Pairs(nn.Module):
    """The numbers, and the function's value at them."""

    def __init__(self, pairs: int, a: float, b: float) -> None:
        super().__init__()
        self._a, self._b = a, b
        self.x = nn.Parameter(torch.randint(-START, START + 1, (2 * pairs,)).to(torch.float64))

    def forward(self) -> Tensor:
        odd, even = self.x.view(-1, 2).unbind(1)
        residuals = torch.cat([self._b**0.5 * (odd**2 - even), odd - self._a])
        # As a product of matrices, so that it has FLOPs by torch's formulas.
        return (residuals.view(1, -1) @ residuals.view(-1, 1)).view(())


class Rosenbrock(Workload):
    """Steps of the length of the learning rate, which is decayed at intervals.

    Args:
        pairs: P, >= 1.
        a: position of the minimum.
        b: steepness of the valley.
        lr: length of a step.
        updates: steps of an epoch.
        decay_from: step of the first decay.
        decay_every: steps from decay to decay.
    """

    name = "rosenbrock"
    steps_per_epoch = 1000
    splits = ("train", "validation")
    quality = WORKLOADS[name].quality

    def __init__(
        self,
        pairs: int = 50,
        a: float = 1.0,
        b: float = 100.0,
        lr: float = 0.1,
        updates: int = 1000,
        decay_from: int = 30_000,
        decay_every: int = 10_000,
    ) -> None:
        check_positive(self.name, pairs=pairs, updates=updates, decay_every=decay_every)
        self._pairs, self._a, self._b, self._lr = pairs, a, b, lr
        self.steps_per_epoch, self._decay_from, self._decay_every = updates, decay_from, decay_every

    def make_model(self) -> nn.Module:
        return Pairs(self._pairs, self._a, self._b)

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return NormalisedSGD([parameter for _, parameter in named_parameters], lr=self._lr)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        decays = range(self._decay_from, max(total_steps, self._decay_from), self._decay_every)
        return MultiStepLR(optimizer, list(decays), DECAY)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        for _ in range(self.steps_per_epoch):
            yield (torch.zeros(1),)  # the function has no data

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model()
        return value

    def evaluate(self, model: nn.Module, split: str, device: Any) -> dict[str, float]:
        best = torch.tensor([self._a, self._a**2], dtype=torch.float64, device=device).repeat(self._pairs)
        return {"value": float(model()), "distance": float((model.get_parameter("x") - best).abs().max())}
