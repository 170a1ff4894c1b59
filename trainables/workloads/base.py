"""Interface between the training loop and a workload."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from trainables.errors import UserError, unknown_name
from trainables.quality import ACCURACY, Quality
from trainables.workload_options import what_is_trained

#: A batch is a tuple of tensors; the first dimension of each indexes the samples.
Batch = tuple[Tensor, ...]


def on_device(batch: Batch, device: Any) -> Batch:
    """Return a batch on a device; onto a GPU from page-locked memory, so that the host does not wait for it."""
    if torch.device(device).type == "cuda":
        batch = tuple(tensor.pin_memory() if tensor.device.type == "cpu" else tensor for tensor in batch)
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def count_hits(model: nn.Module, batches: Iterable[Batch], device: Any) -> int:
    """Return how many targets are the index of the model's largest score, in batches (inputs, targets)."""
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        inputs, targets = on_device(batch, device)
        correct += (model(inputs).argmax(-1) == targets).sum()
    return int(correct)


def digest_of(*parts: Any) -> str:
    """Return a digest of texts, numbers and tensors, for `Workload.fingerprint`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().tobytes() if isinstance(part, Tensor) else f"{part} ".encode())
    return digest.hexdigest()


def check_positive(workload: str, **options: int) -> None:
    """Raise UserError for an option below 1."""
    for option, value in options.items():
        if value < 1:
            raise UserError(f"{option} of workload {workload} must be at least 1, got {value}")


#: Metric that every workload with `evaluation_batches` has.
VALIDATION_LOSS = "val_loss"


class Samples(ABC):
    """Training samples by number, for methods that choose samples themselves."""

    count: int
    """N, the samples that there are."""
    batch_size: int = 1
    """Samples of a batch where nobody names another size."""

    @abstractmethod
    def batch(self, numbers: Tensor, generator: torch.Generator) -> Batch:
        """Return the samples of these numbers, on the CPU.

        Args:
            numbers: (B,) int64.
            generator: source of whatever is drawn, such as augmentation.
        """


class Workload(ABC):
    """Model, data, loss, optimizer and schedule of one training run.

    Nothing here may use the global random state except `make_model`, which the loop calls right after seeding.
    """

    name: str
    """Name on the command line."""
    options: tuple[str, ...] = ()
    """Options as given: NAME=VALUE texts."""
    splits: tuple[str, ...] = ("train", "validation", "test")
    """Available splits; without ``test``, reports show only the validation accuracy."""
    default_epochs: int = 30
    """Epochs of a run unless specified."""
    quality: Quality = ACCURACY
    """The metric that `evaluate` returns, unless a search names another."""
    batch_size: int | None = None
    """Samples of a training step, which may be set before anything is made; None where a loader chooses it."""
    batch_factor: float = 1.0
    """A configuration's batch size over the workload's own."""
    loader_workers: int = 0
    """Processes that prepare batches unless a configuration says otherwise; needs `by_step`."""
    why_inputs_vary: str = "whose inputs do not repeat"
    """Why `different_inputs` is None, for a message."""
    by_step: bool = False
    """True if `batch_at` makes any batch without those before it."""

    @property
    def key(self) -> Hashable:
        """Return a key, equal where models, losses and optimizers are built equal; costs are counted once per key."""
        return (self.name, what_is_trained(self.name, self.options))

    def check(self, seed: int) -> None:  # noqa: B027  # most have nothing to check
        """Raise UserError for user input that cannot be trained. Called once, before a search begins.

        Args:
            seed: seed of the run.
        """

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps per epoch."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Build a fresh model on the CPU."""

    @abstractmethod
    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build a torch optimizer; its parameters, in the given order, have the layer numbers 0, 1, ..."""

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        """Build the learning-rate schedule, stepped after every optimizer step; by default a cosine to 0."""
        return CosineAnnealingLR(optimizer, T_max=total_steps)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        """Yield the epoch's batches on the CPU; they depend only on the arguments, so a run can resume anywhere.

        By default those of `batch_at`.
        """
        return (self.batch_at(epoch, seed, step) for step in range(self.steps_per_epoch))

    def train_batches_from(self, epoch: int, seed: int, start: int) -> Iterator[Batch]:
        """Yield `train_batches` without the first ``start``; override it where batches are expensive to skip."""
        if type(self).train_batches is Workload.train_batches:
            return (self.batch_at(epoch, seed, step) for step in range(start, self.steps_per_epoch))
        return islice(self.train_batches(epoch, seed), start, None)

    def batch_at(self, epoch: int, seed: int, step: int) -> Batch:
        """Return one batch of `train_batches`, where `by_step` says so; other processes may make it."""
        raise NotImplementedError(f"{type(self).__name__} must define train_batches, or batch_at with by_step = True")

    def fingerprint(self) -> str:
        """Return a text that identifies training data and code: equal text means equal training.

        By default a digest of the source of the class's module. Override it where the data can change while the module
        stays the same.
        """
        module = inspect.getmodule(type(self))
        source = inspect.getsource(module) if module is not None else type(self).__qualname__
        return hashlib.sha256(source.encode()).hexdigest()

    @property
    def train_samples(self) -> int | None:
        """Return the number of training samples; None where it is unknown."""
        return None

    @property
    def different_inputs(self) -> int | None:
        """Return how many different inputs training has, however many epochs it runs.

        None: inputs do not repeat (augmentation), or it is unknown whether they do.
        """
        return None

    def samples(self) -> Samples | None:
        """Return the training samples by number; None where there are no numbers, as in a stream."""
        return None

    def evaluation_batches(self, split: str) -> Iterator[Batch] | None:
        """Return the batches of ``validation`` or ``test`` for `loss`, on the CPU; None where a workload has none."""
        return None

    def mean_loss(self, model: nn.Module, split: str, device: Any) -> float | None:
        """Return the mean loss on ``validation`` or ``test``, weighted by samples; None without `evaluation_batches`.

        The model is in eval mode, gradients are off.
        """
        batches = self.evaluation_batches(split)
        if batches is None:
            return None
        total, samples = torch.zeros((), device=device), 0
        for batch in batches:
            total += len(batch[0]) * self.loss(model, on_device(batch, device))
            samples += len(batch[0])
        return float(total) / samples if samples else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar; by default the cross entropy of (inputs, targets)."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def evaluate_a_little(self, model: nn.Module, device: Any) -> float | Mapping[str, float]:
        """Return `evaluate` on a part of the validation split, where the whole takes long."""
        return self.evaluate(model, "validation", device)

    @property
    def little_part(self) -> float:
        """Return the share of the validation split that `evaluate_a_little` uses; 0 if unknown or always sufficient."""
        return 1.0

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float | Mapping[str, float]:
        """Return `quality` on ``validation`` or ``test``, or several metrics by name; in eval mode, gradients off.

        By default the share of targets in `evaluation_batches` that are the index of the largest score.
        """
        if split not in self.splits:
            raise unknown_name("split", split, self.splits)
        targets = 0

        def counted() -> Iterator[Batch]:
            nonlocal targets
            for batch in self.evaluation_batches(split) or ():
                targets += batch[1].numel()
                yield batch

        hits = count_hits(model, counted(), device)
        if not targets:
            raise UserError(f"workload {self.name} must define evaluate, or evaluation_batches of {split}: got none")
        return hits / targets

    def trouble(self, metrics: Mapping[str, float]) -> str:
        """Return what is wrong with the training by an epoch's metrics, in words; empty if nothing is."""
        return ""

    def quality_on(self, model: nn.Module, split: str, device: Any) -> float:
        """Return `quality` alone on a split."""
        return self.metrics_on(model, split, device, self.quality.name)[self.quality.name]

    def metrics_on(self, model: nn.Module, split: str, device: Any, metric: str) -> dict[str, float]:
        """Return the metrics on a split by name: those of `evaluate`, and the mean loss if ``metric`` asks for it.

        Raises:
            UserError: ``metric`` is none of them.
        """
        found = self.evaluate(model, split, device)
        if metric == VALIDATION_LOSS and not (isinstance(found, Mapping) and metric in found):
            loss = self.mean_loss(model, split, device)
            if loss is not None:
                return {**self.named_metrics(found, None), metric: loss}
        return self.named_metrics(found, metric)

    def named_metrics(self, found: float | Mapping[str, float], metric: str | None) -> dict[str, float]:
        """Return what `evaluate` returned by name.

        Args:
            found: a number is `quality`.
            metric: one that is needed.

        Raises:
            UserError: it is not among them.
        """
        named = found if isinstance(found, Mapping) else {self.quality.name: found}
        if metric is not None and metric not in named:
            more = {VALIDATION_LOSS} if self.evaluation_batches("validation") is not None else set()
            raise unknown_name(f"metric of workload {self.name}", metric, sorted({*map(str, named), *more}))
        return {str(name): float(value) for name, value in named.items()}
