"""A workload of binary activations: three layers of 32, float weights, on targets of a fixed network of the same shape.

Shapes: B samples; inputs (B, 32) float32, i.i.d. N(0, 1); targets (B, 32) float32, the teacher's outputs.
Training draws fresh samples in each epoch; validation and test are fixed batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainables.gradients.straight_through import BinaryActivation
from trainables.registry import WORKLOADS
from trainables.workloads.base import Batch, Workload, check_positive, digest_of
from trainables.workloads.seeded_loader import epoch_seed

WIDTH, LAYERS = 32, 3
BATCH_SIZE, STEPS_PER_EPOCH = 1024, 10
LEARNING_RATE, MOMENTUM = 0.5, 0.9
PRETRAINING_STEPS, PRETRAINING_BATCH_SIZE, PRETRAINING_LEARNING_RATE = 500, 16_000, 1e-2
EVALUATION_BATCHES, EVALUATION_BATCH_SIZE = 4, 1024
#: Seeds that are no hyperparameters, so that every study has the same teacher, pretraining and splits. The teacher's is
#: none that a run would have: a student of the same seed would begin as the teacher itself.
TEACHER_SEED, PRETRAINING_SEED = 2_718_281_828, 1
SPLIT_SEEDS = {"validation": 2, "test": 3}
#: Pretrained models of this process, by their initial weights: a stage tree builds the same one again and again.
_pretrained: dict[str, dict[str, Tensor]] = {}


def network() -> nn.Sequential:
    """Build three linear layers with binary activations between them; torch's initial weights."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(1, LAYERS + 1):
        layers[f"linear{number}"] = nn.Linear(WIDTH, WIDTH)
        if number < LAYERS:
            layers[f"binary{number}"] = BinaryActivation()
    return nn.Sequential(layers)


@lru_cache(maxsize=1)
def teacher() -> nn.Sequential:
    """Return the network whose outputs are the targets; cached, so it must not be modified."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(TEACHER_SEED)
        return network().requires_grad_(False).eval()


def draw(generator: torch.Generator, samples: int) -> Batch:
    """Draw inputs and compute their targets."""
    inputs = torch.randn(samples, WIDTH, generator=generator)
    with torch.no_grad():
        return inputs, teacher()(inputs)


@lru_cache(maxsize=len(SPLIT_SEEDS))
def _split(split: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(SPLIT_SEEDS[split])
    return [draw(generator, EVALUATION_BATCH_SIZE) for _ in range(EVALUATION_BATCHES)]


class BinaryMLP(Workload):
    """Three linear layers of width 32 with binary activations, SGD with momentum, cosine schedule, mean squared error.

    Args:
        pretrained: whether the model comes from 500 steps of Adam at batch 16,000 with the plain straight-through
            estimator. They are done once a process for equal initial weights, and are no part of a trial's compute.
        batch_size: samples of a batch, >= 1.
        steps_per_epoch: batches of an epoch, >= 1.

    Raises:
        UserError: a number below 1.
    """

    name = "binary_mlp"
    steps_per_epoch = STEPS_PER_EPOCH
    quality = WORKLOADS[name].quality

    def __init__(
        self, *, pretrained: bool = False, batch_size: int = BATCH_SIZE, steps_per_epoch: int = STEPS_PER_EPOCH
    ) -> None:
        check_positive(self.name, batch_size=batch_size, steps_per_epoch=steps_per_epoch)
        self._pretrained, self._batch_size, self.steps_per_epoch = pretrained, batch_size, steps_per_epoch

    def make_model(self) -> nn.Module:
        model = network()
        if self._pretrained:
            pretrain(model)
        return model

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=LEARNING_RATE, momentum=MOMENTUM)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        # One generator per epoch: the batches of epoch k are drawn without drawing those of the epochs before it.
        generator = torch.Generator().manual_seed(epoch_seed(epoch, seed))
        for _ in range(self.steps_per_epoch):
            yield draw(generator, self._batch_size)

    def fingerprint(self) -> str:
        options = (self._pretrained, self._batch_size, self.steps_per_epoch)
        return digest_of(super().fingerprint(), *options, *teacher().state_dict().values())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        yield from _split(split)

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float:
        error = self.mean_loss(model, split, device)
        assert error is not None
        return error


def pretrain(model: nn.Module, steps: int | None = None) -> None:
    """Train a network in place, or give it the weights that the same training in this process gave.

    Args:
        model: from `network`.
        steps: steps of Adam; None for 500.
    """
    steps = PRETRAINING_STEPS if steps is None else steps
    key = digest_of(steps, *model.state_dict().values())
    if key not in _pretrained:
        generator = torch.Generator().manual_seed(PRETRAINING_SEED)
        optimizer = Adam(model.parameters(), lr=PRETRAINING_LEARNING_RATE)
        schedule = CosineAnnealingLR(optimizer, T_max=steps)
        with torch.enable_grad():
            for _ in range(steps):
                inputs, targets = draw(generator, PRETRAINING_BATCH_SIZE)
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                schedule.step()
        model.zero_grad()
        _pretrained[key] = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(_pretrained[key])
