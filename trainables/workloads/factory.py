"""A workload from a user's function: ``--workload package.module:function``.

`trainables.workloads.factory_parts` documents what the function returns. It is called once per process, with the
options as keyword arguments and with seeded generators, so that a random split is the same in every trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from trainables.errors import UserError
from trainables.quality import ACCURACY, Quality, quality_named
from trainables.runtime.isolation import isolated
from trainables.workload_options import call_with_options, read_options
from trainables.workloads.base import Batch, Samples, Workload
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.factory_parts import Parts, check_evaluation, check_labels, hits, read_parts
from trainables.workloads.sample_access import samples_of
from trainables.workloads.seeded_loader import seeded_epoch
from trainables.workloads.smoke_test import smoke_test
from trainables.workloads.user_code import code_digest, import_function

#: Batches of an evaluation that only tests whether evaluation is repeatable.
_FEW_BATCHES = 2
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4


@lru_cache(maxsize=4)
def load(name: str, options: tuple[str, ...] = ()) -> Workload:
    """Return the workload of ``package.module:function``, from its parts or a `Workload` itself; once per process.

    Args:
        name: name of the function.
        options: NAME=VALUE texts, its keyword arguments.

    Raises:
        UserError: the function cannot be imported or called, or returned something that `read_parts` rejects.
    """
    made = _call(name, options)
    if isinstance(made, Workload):
        made.name = name
        return made
    return FactoryWorkload(name, made)


def _call(name: str, options: tuple[str, ...]) -> Parts | Workload:
    """Call the factory and return its `Workload` or its checked parts."""
    function = import_function(name, "workload")
    with isolated(seed=0, threads=torch.get_num_threads()):
        try:
            returned = call_with_options(function, read_options(options), f"workload {name}")
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise UserError(f"workload {name} raised {type(error).__name__}: {error}") from error
    return returned if isinstance(returned, Workload) else read_parts(returned, name)


class FactoryWorkload(Workload):
    """The workload of a factory.

    Args:
        name: ``package.module:function``.
        made: the parts that the function returned.
    """

    def __init__(self, name: str, made: Parts) -> None:
        self.name, self._made = name, made
        self.default_epochs = made.epochs
        self.quality = _quality_of(name, made)
        self.splits = ("train", "validation", *(["test"] if made.test is not None else []))
        self._data: str | None = None
        self._structure: Any = None
        self._classes: int | None = None
        self._length: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        if self._length is None:
            self._length = self._made.steps_per_epoch or self._count()
        return self._length

    def _count(self) -> int:
        loader = self._epoch_of(0, 0)
        try:
            length = len(loader)
        except TypeError:
            raise UserError(f"train of workload {self.name} has no length: return steps_per_epoch, too") from None
        if length == 0:
            raise UserError(f"train of workload {self.name} is empty")
        return length

    def _epoch_of(self, epoch: int, seed: int) -> Any:
        train = self._made.train
        return train(epoch, seed) if callable(train) and not hasattr(train, "__iter__") else train

    def make_model(self) -> nn.Module:
        model = self._made.model()
        if not isinstance(model, nn.Module):
            raise UserError(f"model of workload {self.name} must return an nn.Module, got {type(model).__name__}")
        return model

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        if self._made.optimizer is None:
            return SGD(named_parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        made = self._made.optimizer(list(named_parameters))
        if not isinstance(made, Optimizer):
            raise UserError(
                f"optimizer of workload {self.name} must return a torch optimizer, got {type(made).__name__}"
            )
        return made

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        if self._made.schedule is None:
            return CosineAnnealingLR(optimizer, T_max=total_steps)
        made = self._made.schedule(optimizer, total_steps)
        if not isinstance(made, LRScheduler):
            raise UserError(
                f"schedule of workload {self.name} must return a scheduler of torch.optim.lr_scheduler, got "
                f"{type(made).__name__}"
            )
        return made

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        wanted = self.steps_per_epoch
        seen = 0
        for batch in islice(seeded_epoch(self._epoch_of(epoch, seed), epoch, seed), wanted):
            yield self._taken(batch)
            seen += 1
        if seen < wanted:
            raise UserError(f"train of workload {self.name} gave {seen} batches in epoch {epoch}, not {wanted}")

    def samples(self) -> Samples | None:
        train = self._made.train
        if not isinstance(train, DataLoader) or isinstance(train.dataset, IterableDataset):
            return None
        try:
            return samples_of(train)
        except UserError:  # a data set without a length
            return None

    def _taken(self, batch: Any) -> Batch:
        if self._structure is None:
            self._structure = structure_of(batch)
        tensors = flatten(batch)
        if tensors[0].dim() == 0:
            raise UserError(f"a batch of workload {self.name} must begin with the samples' dimension, got a number")
        if self._classes is not None and len(tensors) == 2 and self._made.loss is None:
            check_labels(tensors[1], self._classes, self.name)
        return tensors

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._made.loss is not None:
            return self._made.loss(model, unflatten(self._batch_structure(), batch))
        inputs, targets = batch
        outputs = model(inputs)
        if self._classes is None:
            self._classes = int(outputs.shape[1])
            if targets.device.type == "cpu":
                check_labels(targets, self._classes, self.name)
        return F.cross_entropy(outputs, targets)

    def _batch_structure(self) -> Any:
        if self._structure is None:
            next(self.train_batches(0, 0))
        return self._structure

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        batches = self._made.validation if split == "validation" else self._made.test
        for batch in () if batches is None else batches:
            yield flatten(batch)

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float | Mapping[str, float]:
        batches = self._made.validation if split == "validation" else self._made.test
        assert batches is not None
        return self._evaluate_on(batches, split, model, device)

    def evaluate_a_little(self, model: nn.Module, device: Any) -> float | Mapping[str, float]:
        first = list(islice(seeded_epoch(self._made.validation, 0, 0), _FEW_BATCHES))
        return self._evaluate_on(first, "validation", model, device)

    @property
    def little_part(self) -> float:
        """Return the share of the validation batches that `evaluate_a_little` uses; 0 if their number is unknown."""
        try:
            batches = len(self._made.validation)  # type: ignore[arg-type]
        except TypeError:
            return 0.0
        return min(1.0, _FEW_BATCHES / batches) if batches else 0.0

    def _evaluate_on(
        self, batches: Iterable[Any], split: str, model: nn.Module, device: Any
    ) -> float | Mapping[str, float]:
        if self._made.evaluate is not None:
            return check_evaluation(self._made.evaluate(model, batches, device), self.name, self.quality)
        correct, count = torch.zeros((), dtype=torch.int64, device=device), 0
        for batch in batches:
            inputs, targets = flatten(batch)
            correct += hits(self.name, model, inputs.to(device), targets.to(device))
            count += targets.numel()
        if count == 0:
            raise UserError(f"{split} of workload {self.name} is empty")
        return int(correct) / count

    def fingerprint(self) -> str:
        if self._data is None:
            self._data = self._made.fingerprint or self._data_digest()
        code = code_digest(self.name.partition(":")[0])  # read each time: the user may fix it while a search waits
        return hashlib.sha256(f"{code} {self._data}".encode()).hexdigest()

    def _data_digest(self) -> str:
        """Return a digest of the first batches and of the numbers of batches."""
        digest = hashlib.sha256()
        digest.update(str(self.steps_per_epoch).encode())
        parts = [seeded_epoch(self._epoch_of(0, 0), 0, 0), seeded_epoch(self._made.validation, 0, 0)]
        for first in parts:
            for tensor in flatten(next(first, torch.empty(0))):
                digest.update(f"{tensor.shape} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for batches in (self._made.validation, self._made.test):
            if isinstance(batches, Sized):
                digest.update(str(len(batches)).encode())
        return digest.hexdigest()

    def check(self, seed: int) -> None:
        """Run every part once: one batch through model, loss and evaluation."""
        with isolated(seed=seed, threads=torch.get_num_threads()):
            self._classes = smoke_test(self, self._made, seed)


def _quality_of(name: str, made: Parts) -> Quality:
    if made.metric is None:
        if made.direction is not None or made.unit is not None:
            raise UserError(f"direction and unit of workload {name} must come with the metric they are of: give metric")
        return ACCURACY
    return quality_named(made.metric, made.direction, made.unit)
