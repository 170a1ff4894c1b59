"""A workload from a user's function: ``--workload package.module:function``.

What the function returns is documented below. It is called once per process, with the
options as keyword arguments and with seeded generators, so that a random split is the same in every trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from trainables.errors import UserError, unknown_name
from trainables.quality import ACCURACY, Quality, quality_named
from trainables.runtime.isolation import isolated
from trainables.workload_options import call_with_options, read_options
from trainables.workloads.base import Batch, Samples, Workload
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.sample_access import samples_of
from trainables.workloads.seeded_loader import seeded_epoch
from trainables.workloads.user_code import code_digest, import_function

# --- Parts that a user's workload function returns, and checks of the parts and of their defaults ---------------------
# The function returns a dict, or any object with attributes, of the parts below; only ``model``, ``train`` and
# ``validation`` have no default.
#
#     model        () -> nn.Module: a fresh model, on the CPU; called after the trial's seed was set
#     train        batches of an epoch: a DataLoader, or anything that can be iterated anew each epoch; or a function
#                  (epoch, seed) -> batches. A batch is a tensor, or tuples, lists, dicts of tensors
#     validation   batches on which the search evaluates trials
#     test         batches that are read once, after the last epoch. None: reports show only the validation accuracy
#     loss         (model, batch) -> Tensor: mean loss of a batch. By default cross entropy of ``model(inputs)`` and
#                  ``targets``, for batches (inputs, targets)
#     evaluate     (model, batches, device) -> float, or a dict of several metrics by name. By default the share of
#                  targets equal to the index of the model's largest output
#     metric       name of what ``evaluate`` returns, or of the one in the dict that trials are compared by; by default
#                  ``accuracy``, which is higher where better and 1 at most
#     direction    ``min`` where a smaller metric is better, ``max`` where a larger one is; by default what its name
#     says
#     unit         of the metric, in words; ``fraction`` is shown in percent and points
#     optimizer    (named_parameters) -> Optimizer. By default SGD, lr 0.1, momentum 0.9, weight decay 5e-4
#     schedule     (optimizer, total_steps) -> LRScheduler, stepped after each step. By default cosine to 0
#     epochs       passes over the data, >= 1; by default 30
#     steps_per_epoch   batches per epoch, needed where ``train`` has no length
#     fingerprint  text that changes when the data does. By default from the first batches and the numbers of batches


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that a factory returned; described in the module's docstring."""

    model: Callable[[], nn.Module]
    """() -> a fresh model."""
    train: Any
    """Batches of an epoch, or (epoch, seed) -> batches."""
    validation: Iterable[Any]
    """Validation batches."""
    test: Iterable[Any] | None = None
    """Test batches."""
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """(model, batch) -> mean loss."""
    evaluate: Callable[[nn.Module, Iterable[Any], Any], float | Mapping[str, float]] | None = None
    """(model, batches, device) -> the metric, or several by name."""
    metric: str | None = None
    """Name of the metric."""
    direction: str | None = None
    """``min`` or ``max``."""
    unit: str | None = None
    """Unit of the metric."""
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer] | None = None
    """(named_parameters) -> optimizer."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, total_steps) -> schedule."""
    epochs: int = 30
    """Passes over the data."""
    steps_per_epoch: int | None = None
    """Batches per epoch, where ``train`` has no length."""
    fingerprint: str | None = None
    """Text that changes when the data does."""


#: Parts that are functions, and their signatures.
_FUNCTIONS = {
    "model": "() -> nn.Module",
    "loss": "(model, batch) -> Tensor",
    "evaluate": "(model, batches, device) -> float",
    "optimizer": "(named_parameters) -> Optimizer",
    "schedule": "(optimizer, total_steps) -> LRScheduler",
}


def read_parts(returned: Any, name: str) -> Parts:
    """Check what a factory returned and return it as parts.

    Raises:
        UserError: it returned None, or a part is missing, unknown or of the wrong kind.
    """
    known = [field.name for field in fields(Parts)]
    wanted = "a dict of model (a function), train, validation, ..."
    if returned is None:
        raise UserError(f"workload {name} returned None: return {wanted}")
    if isinstance(returned, nn.Module):
        raise UserError(f"workload {name} returned a model: return {wanted}")
    if isinstance(returned, Mapping):
        given = dict(returned)
        for key in given:
            if key not in known:
                raise unknown_name(f"part of workload {name}", str(key), known)
    else:
        given = {key: getattr(returned, key) for key in known if hasattr(returned, key)}
    given = {key: value for key, value in given.items() if value is not None}
    for key in ("model", "train", "validation"):
        if key not in given:
            raise UserError(f"workload {name} must return {key}: there is no default for it")
    for key, value in given.items():
        of = f"{key} of workload {name}"
        if key in _FUNCTIONS:
            _check_function(value, of, _FUNCTIONS[key], may_be_module=key == "loss")
        elif key in ("train", "validation", "test"):
            _check_batches(value, of, may_be_function=key == "train")
        elif key in ("fingerprint", "metric", "direction", "unit"):
            if not isinstance(value, str):
                raise UserError(f"{of} must be text, got {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{of} must be an integer >= 1, got {value!r}")
    return Parts(**given)


def _check_function(value: Any, of: str, signature: str, *, may_be_module: bool) -> None:
    if isinstance(value, nn.Module) and not may_be_module:
        raise UserError(
            f"{of} must be a function {signature} that makes a fresh one, got a model that is built already "
            f"({type(value).__name__}): every trial would go on with the same weights"
        )
    if not callable(value):
        raise UserError(f"{of} must be a function {signature}, got {type(value).__name__}")


def _check_batches(value: Any, of: str, *, may_be_function: bool) -> None:
    if not hasattr(value, "__iter__") and not (may_be_function and callable(value)):
        raise UserError(f"{of} must be batches, such as a DataLoader, got {type(value).__name__}")
    if iter_once(value):
        raise UserError(
            f"{of} can be iterated only once, and every epoch needs it: give a DataLoader or a list, not a generator"
        )
    if getattr(value, "persistent_workers", False):
        raise UserError(
            f"{of} must not keep its worker processes (persistent_workers=True): their random generators would go on "
            "from epoch to epoch, so that no run could be continued"
        )


def iter_once(value: Any) -> bool:
    """Return whether the value is an iterator, which can be iterated only once."""
    return hasattr(value, "__next__")


def hits(name: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return how many targets equal the index of the model's largest output, as a tensor on their device.

    Raises:
        UserError: the targets are not one class number for each prediction of the model.
    """
    chosen = model(inputs).argmax(1)
    if chosen.shape != targets.shape:
        raise UserError(
            f"evaluate of workload {name} must be given, for its default takes a class number for each choice "
            f"of the model, {tuple(chosen.shape)} here, and the targets are {tuple(targets.shape)}"
        )
    return (chosen == targets).sum()


def check_labels(targets: Tensor, classes: int, name: str) -> None:
    """Raise UserError for a class number for which the model has no output."""
    if targets.dtype == torch.int64 and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        wrong = low if low < 0 and low != -100 else high  # cross entropy ignores -100
        if wrong >= classes or wrong < -100 or -100 < wrong < 0:
            raise UserError(
                f"labels of workload {name} must be in 0..{classes - 1}, which is what its model has outputs for, got "
                f"{wrong}"
            )


def check_evaluation(found: Any, name: str, quality: Quality) -> dict[str, float]:
    """Return the metrics that the user's evaluation returned, by name.

    Raises:
        UserError: no number, not the metric that the factory names, or a fraction above 1, as a percentage would be.
    """
    named = found if isinstance(found, Mapping) else {quality.name: found}
    values = {}
    for key, value in named.items():
        try:
            values[str(key)] = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"evaluate of workload {name} must return a number, or numbers by name, got {type(value).__name__}"
            ) from None
    if quality.is_fraction and values.get(quality.name, 0.0) > 1:
        raise UserError(
            f"evaluate of workload {name} must return a fraction, 1 at most and higher is better, got "
            f"{values[quality.name]:g}: divide a percentage by 100, or name the metric, such as metric='val_loss'"
        )
    return values


# --- Runs every part of a user's workload once before a search begins, and reports an error in one line ---------------


def smoke_test(workload: Workload, parts: Parts, seed: int) -> int | None:
    """Build model, optimizer and schedule, take one training step and evaluate one batch, on the CPU.

    Returns:
        The number of the model's outputs where the default classification loss is used, else None.

    Raises:
        UserError: a part raised, or returned something of the wrong kind.
    """
    name = workload.name
    model = _tried(name, "model", workload.make_model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model of workload {name} must have parameters that train, got none")
    optimizer = _tried(name, "optimizer", lambda: workload.make_optimizer(model.named_parameters()))
    scheduler = _tried(name, "schedule", lambda: workload.make_scheduler(optimizer, workload.steps_per_epoch))
    batch = _first(name, "train", lambda: next(workload.train_batches(0, seed), None))
    classes = None
    if parts.loss is None or parts.evaluate is None:
        part = "loss" if parts.loss is None else "evaluate"
        _check_pair(name, "train", batch, part)
        for split, batches in (("validation", parts.validation), ("test", parts.test)):
            if batches is not None:
                _check_pair(name, split, _first(name, split, partial(_flat, batches)), part)
    if parts.loss is None:
        classes = _outputs(name, model, batch)
    model.train()
    loss = _tried(name, "loss", lambda: workload.loss(model, batch))
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"loss of workload {name} must return the mean loss, a tensor with one number, got {got}")
    if not loss.requires_grad:
        raise UserError(f"loss of workload {name} must depend on the model's parameters, got one without a gradient")
    _tried(name, "loss", loss.backward)
    _tried(name, "optimizer", optimizer.step)
    _tried(name, "schedule", scheduler.step)
    _check_evaluate(workload, parts, model)
    return classes


def _check_evaluate(workload: Workload, parts: Parts, model: Any) -> None:
    """Check that evaluating one batch of each split works and returns numbers; the value itself is ignored."""
    name = workload.name
    model.eval()
    with torch.no_grad():
        for batches in (parts.validation, parts.test):
            if batches is None:
                continue
            first = list(islice(seeded_epoch(batches, 0, 0), 1))
            if parts.evaluate is None:
                inputs, targets = flatten(first[0])
                _tried(name, "evaluate", partial(hits, name, model, inputs, targets))
                continue
            value = _tried(name, "evaluate", partial(parts.evaluate, model, first, torch.device("cpu")))
            check_evaluation(value, name, workload.quality)


def _flat(batches: Any) -> tuple[Tensor, ...] | None:
    found = next(seeded_epoch(batches, 0, 0), None)
    return None if found is None else flatten(found)


def _first(name: str, split: str, take: Callable[[], Any]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] | None = _tried(name, split, take)
    if found is None or len(found[0]) == 0:
        raise UserError(f"{split} of workload {name} is empty")
    return found


def _check_pair(name: str, split: str, batch: tuple[Tensor, ...], part: str) -> None:
    if len(batch) != 2:
        raise UserError(
            f"{part} of workload {name} must be given, for its default takes batches (inputs, targets), and those of "
            f"{split} hold {len(batch)} tensors"
        )
    if len(batch[0]) != len(batch[1]):
        raise UserError(
            f"a batch of workload {name} must have as many targets as inputs, got {len(batch[1])} and {len(batch[0])} "
            f"in {split}"
        )


def _outputs(name: str, model: Any, batch: tuple[Tensor, ...]) -> int | None:
    inputs, targets = batch
    with torch.no_grad():
        outputs = _tried(name, "model", lambda: model(inputs))
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != len(inputs):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(
            f"model of workload {name} must return (batch, classes) for the default loss, got {got} for "
            f"{len(inputs)} inputs: give loss, too"
        )
    classes = int(outputs.shape[1])
    check_labels(targets, classes, name)
    return classes


def _tried(name: str, part: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's functions may raise anything
        text = str(error).strip().splitlines()
        raise UserError(
            f"{part} of workload {name} raised {type(error).__name__}: {text[0] if text else 'no message'}; --debug "
            "shows where"
        ) from error


# --- A workload from a user's function --------------------------------------------------------------------------------

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
