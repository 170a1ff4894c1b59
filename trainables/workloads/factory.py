"""A workload from a user's function: ``--workload package.module:function``.

The function returns a dict, or any object with attributes, of the fields of `Parts`; only ``model``, ``train`` and
``validation`` have no default. It is called once per process, with the options as keyword arguments and with seeded
generators, so that a random split is the same in every trial. A batch is a tensor, or tuples, lists, dicts of tensors.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainables.errors import UserError, unknown_name
from trainables.quality import ACCURACY, quality_named
from trainables.runtime.isolation import isolated, kept_generators
from trainables.workload_options import keywords_of, read_options
from trainables.workloads.base import VALIDATION_LOSS, Batch, Samples, Workload, on_device
from trainables.workloads.batch_structure import flatten, structure_of, unflatten
from trainables.workloads.sample_access import check_repeats, samples_of, view_of
from trainables.workloads.seeded_loader import epoch_seed, seeded_epoch
from trainables.workloads.user_code import code_digest, import_function

#: Batches of an evaluation that only tests whether evaluation is repeatable.
_FEW_BATCHES = 2
#: Share of the highest learning rate below which one is suspicious after the first of several epochs.
_SMALL_RATE = 0.01
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that a factory returned."""

    model: Callable[[], nn.Module]
    """() -> a fresh model, on the CPU; called after the trial's seed was set."""
    train: Any
    """Batches of an epoch: a DataLoader, or anything that can be iterated anew each epoch; or (epoch, seed) -> them."""
    validation: Iterable[Any]
    """Batches on which the search evaluates trials."""
    test: Iterable[Any] | None = None
    """Batches that are read once, after the last epoch. None: reports show only the validation accuracy."""
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """(model, batch) -> mean loss. None: cross entropy of ``model(inputs)`` for batches (inputs, targets)."""
    evaluate: Callable[[nn.Module, Iterable[Any], Any], float | Mapping[str, float]] | None = None
    """(model, batches, device) -> the metric, or several by name. None: the share of targets equal to the index of the
    model's largest output."""
    metric: str | None = None
    """Name of the metric by which trials are compared. None: ``accuracy``, higher where better and 1 at most."""
    direction: str | None = None
    """``min`` where a smaller metric is better, ``max`` where a larger one is. None: what its name says."""
    unit: str | None = None
    """Of the metric, in words; ``fraction`` is shown in percent and points."""
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer] | None = None
    """(named_parameters) -> optimizer. None: SGD, lr 0.1, momentum 0.9, weight decay 5e-4."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, total_steps) -> schedule, stepped after each step. None: cosine to 0."""
    epochs: int = 30
    """Passes over the data, >= 1."""
    steps_per_epoch: int | None = None
    """Batches per epoch, needed where ``train`` has no length."""
    views: int | None = None
    """Versions of each sample of a DataLoader under random augmentation: epoch e trains on version e modulo ``views``,
    which repeats exactly. None: drawn anew in each epoch."""
    fingerprint: str | None = None
    """Text that changes when the data does. None: from the first batches and the numbers of batches."""


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
    if returned is None or isinstance(returned, nn.Module):
        what = "None" if returned is None else "a model"
        raise UserError(f"workload {name} returned {what}: return a dict of model (a function), train, validation, ...")
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
            if isinstance(value, nn.Module) and key != "loss":
                raise UserError(
                    f"{of} must be a function {_FUNCTIONS[key]} that makes a fresh one, got a model that is built "
                    f"already ({type(value).__name__}): every trial would go on with the same weights"
                )
            if not callable(value):
                raise UserError(f"{of} must be a function {_FUNCTIONS[key]}, got {type(value).__name__}")
        elif key in ("train", "validation", "test"):
            _check_batches(value, of, may_be_function=key == "train")
        elif key in ("fingerprint", "metric", "direction", "unit"):
            if not isinstance(value, str):
                raise UserError(f"{of} must be text, got {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{of} must be an integer >= 1, got {value!r}")
    return Parts(**given)


def _check_batches(value: Any, of: str, *, may_be_function: bool) -> None:
    if not hasattr(value, "__iter__") and not (may_be_function and callable(value)):
        raise UserError(f"{of} must be batches, such as a DataLoader, got {type(value).__name__}")
    if hasattr(value, "__next__"):
        raise UserError(
            f"{of} can be iterated only once, and every epoch needs it: give a DataLoader or a list, not a generator"
        )
    if getattr(value, "persistent_workers", False):
        raise UserError(
            f"{of} must not keep its worker processes (persistent_workers=True): their random generators would go on "
            "from epoch to epoch, so that no run could be continued"
        )


@lru_cache(maxsize=4)
def load(name: str, options: tuple[str, ...] = ()) -> Workload:
    """Return the workload of ``package.module:function``, from its parts or a `Workload` itself; once per process.

    Args:
        name: name of the function.
        options: NAME=VALUE texts, its keyword arguments.

    Raises:
        UserError: the function cannot be imported or called, or returned something that `read_parts` rejects.
    """
    function = import_function(name, "workload")
    with isolated(seed=0, threads=torch.get_num_threads()):
        try:
            returned = function(**keywords_of(function, read_options(options), f"workload {name}"))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise UserError(f"workload {name} raised {type(error).__name__}: {error}") from error
    if isinstance(returned, Workload):
        returned.name = name
        return returned
    return FactoryWorkload(name, read_parts(returned, name))


class FactoryWorkload(Workload):
    """The workload of a factory.

    Args:
        name: ``package.module:function``.
        made: the parts that the function returned.
    """

    def __init__(self, name: str, made: Parts) -> None:
        if made.metric == VALIDATION_LOSS and made.evaluate is None:
            made = replace(made, evaluate=lambda *_: {})  # `metrics_on` measures it
        self.name, self._made = name, made
        self.default_epochs = made.epochs
        self.quality = ACCURACY if made.metric is None else quality_named(made.metric, made.direction, made.unit)
        if made.metric is None and (made.direction is not None or made.unit is not None):
            raise UserError(f"direction and unit of workload {name} must come with the metric they are of: give metric")
        self._evaluated = {"validation": made.validation}
        if made.test is not None:
            self._evaluated["test"] = made.test
        self.splits = ("train", *self._evaluated)
        self._data: str | None = None
        self._structure: Any = None
        self._classes: int | None = None
        self._length: int | None = made.steps_per_epoch
        self._repeats = False  # whether training samples were drawn twice, and were the same

    @property
    def steps_per_epoch(self) -> int:
        if self._length is None:
            try:
                self._length = len(self._epoch_of(0, 0))
            except TypeError:
                raise UserError(f"train of workload {self.name} has no length: return steps_per_epoch, too") from None
            if self._length == 0:
                raise UserError(f"train of workload {self.name} is empty")
        return self._length

    def _epoch_of(self, epoch: int, seed: int) -> Any:
        train, views = self._made.train, self._made.views
        if callable(train) and not hasattr(train, "__iter__"):
            train = train(epoch, seed)
        if views is None:
            return train
        if not isinstance(train, DataLoader):
            raise UserError(f"views of workload {self.name} needs a train that is a DataLoader: leave it out")
        return view_of(train, epoch_seed(epoch % views, seed))

    def make_model(self) -> nn.Module:
        model: nn.Module = self._of_kind("model", "an nn.Module", nn.Module, self._made.model())
        return model

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        if self._made.optimizer is None:
            return SGD(named_parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        made = self._made.optimizer(list(named_parameters))
        optimizer: Optimizer = self._of_kind("optimizer", "a torch optimizer", Optimizer, made)
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        if self._made.schedule is None:
            return super().make_scheduler(optimizer, total_steps)
        made = self._made.schedule(optimizer, total_steps)
        what = "a scheduler of torch.optim.lr_scheduler"
        scheduler: LRScheduler = self._of_kind("schedule", what, LRScheduler, made)
        return scheduler

    def _of_kind(self, part: str, what: str, kind: type, made: Any) -> Any:
        if not isinstance(made, kind):
            raise UserError(f"{part} of workload {self.name} must return {what}, got {type(made).__name__}")
        return made

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        wanted = self.steps_per_epoch
        seen = 0
        for batch in islice(seeded_epoch(self._epoch_of(epoch, seed), epoch, seed), wanted):
            if self._structure is None:
                self._structure = structure_of(batch)
            tensors = flatten(batch)
            if tensors[0].dim() == 0:
                raise UserError(f"a batch of workload {self.name} must begin with the samples' dimension, got a number")
            if self._classes is not None and len(tensors) == 2 and self._made.loss is None:
                self._check_labels(tensors[1], self._classes)
            yield tensors
            seen += 1
        if seen < wanted:
            raise UserError(f"train of workload {self.name} gave {seen} batches in epoch {epoch}, not {wanted}")

    @property
    def train_samples(self) -> int | None:
        with kept_generators([]):
            train = self._epoch_of(0, 0)
        if isinstance(train, DataLoader):
            return len(train.dataset)  # type: ignore[arg-type]
        return sum(len(flatten(batch)[0]) for batch in train) if isinstance(train, (list, tuple)) else None

    @property
    def different_inputs(self) -> int | None:
        with kept_generators([]):
            train = self._epoch_of(0, 0)
            if not isinstance(train, (DataLoader, list, tuple)):
                kind = type(train).__name__
                self.why_inputs_vary = f"whose train is a {kind}: give a DataLoader, or a list of batches"
                return None
            if isinstance(train, DataLoader) and not self._repeats:
                try:
                    check_repeats(train)
                except UserError as error:
                    self.why_inputs_vary = f"whose inputs do not repeat: {error}"
                    return None
                self._repeats = True
        samples = self.train_samples
        return None if samples is None else samples * (self._made.views or 1)

    def samples(self) -> Samples | None:
        with suppress(UserError):  # a stream, or a data set without a length
            return samples_of(self._made.train) if isinstance(self._made.train, DataLoader) else None
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._made.loss is not None:
            if self._structure is None:
                next(self.train_batches(0, 0))
            return self._made.loss(model, unflatten(self._structure, batch))
        inputs, targets = batch
        outputs = model(inputs)
        if self._classes is None:
            self._classes = int(outputs.shape[1])
            if targets.device.type == "cpu":
                self._check_labels(targets, self._classes)
        return F.cross_entropy(outputs, targets)

    def _check_labels(self, targets: Tensor, classes: int) -> None:
        if targets.dtype == torch.int64 and targets.numel():
            low, high = int(targets.min()), int(targets.max())
            wrong = low if low < 0 and low != -100 else high  # cross entropy ignores -100
            if wrong >= classes or wrong < -100 or -100 < wrong < 0:
                raise UserError(
                    f"labels of workload {self.name} must be in 0..{classes - 1}, which is what its model has outputs "
                    f"for, got {wrong}"
                )

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return map(flatten, self._evaluated.get(split, ()))

    def evaluate(self, model: nn.Module, split: str, device: Any) -> float | Mapping[str, float]:
        return self._evaluate_on(self._evaluated[split], split, model, device)

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
            return self._checked_metrics(self._made.evaluate(model, batches, device))
        correct, count = torch.zeros((), dtype=torch.int64, device=device), 0
        for batch in batches:
            inputs, targets = on_device(flatten(batch), device)
            outputs = model(inputs)
            chosen = outputs.argmax(min(1, outputs.dim() - 1))
            if chosen.shape != targets.shape:
                raise UserError(
                    f"evaluate of workload {self.name} must be given, for its default takes a class number for each "
                    f"choice of the model, {tuple(chosen.shape)} here, and the targets are {tuple(targets.shape)}"
                )
            correct += (chosen == targets).sum()
            count += targets.numel()
        if count == 0:
            raise UserError(f"{split} of workload {self.name} is empty")
        return int(correct) / count

    def _checked_metrics(self, found: Any) -> dict[str, float]:
        """Return the metrics that the user's evaluation returned, by name; UserError for anything else."""
        values = {}
        for key, value in (found if isinstance(found, Mapping) else {self.quality.name: found}).items():
            try:
                values[str(key)] = float(value)
            except (TypeError, ValueError):
                raise UserError(
                    f"evaluate of workload {self.name} must return a number, or numbers by name, got "
                    f"{type(value).__name__}"
                ) from None
        if self.quality.is_fraction and values.get(self.quality.name, 0.0) > 1:
            raise UserError(
                f"evaluate of workload {self.name} must return a fraction, 1 at most and higher is better, got "
                f"{values[self.quality.name]:g}: divide a percentage by 100, or name the metric, such as "
                "metric='val_loss'"
            )
        return values

    def fingerprint(self) -> str:
        if self._data is None:
            self._data = self._made.fingerprint or self._data_digest()
        code = code_digest(self.name.partition(":")[0])  # read each time: the user may fix it while a search waits
        views = "" if self._made.views is None else f" {self._made.views} views"
        return hashlib.sha256(f"{code} {self._data}{views}".encode()).hexdigest()

    def _data_digest(self) -> str:
        digest = hashlib.sha256(str(self.steps_per_epoch).encode())
        for batches in (self._epoch_of(0, 0), self._made.validation):
            for tensor in flatten(next(seeded_epoch(batches, 0, 0), torch.empty(0))):
                digest.update(f"{tensor.shape} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for batches in self._evaluated.values():
            if isinstance(batches, Sized):
                digest.update(str(len(batches)).encode())
        return digest.hexdigest()

    # --- Every part once, before a search begins ----------------------------------------------------------------------

    def check(self, seed: int) -> None:
        """Build model, optimizer and schedule, take one training step and evaluate one batch, on the CPU.

        Raises:
            UserError: a part raised, or returned something of the wrong kind.
        """
        with isolated(seed=seed, threads=torch.get_num_threads()):
            self._classes = self._train_a_step(seed)

    def _train_a_step(self, seed: int) -> int | None:
        """Run every part; return the number of outputs where the default classification loss is used, else None."""
        name, made = self.name, self._made
        model = self._tried("model", self.make_model)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"model of workload {name} must have parameters that train, got none")
        optimizer = self._tried("optimizer", lambda: self.make_optimizer(model.named_parameters()))
        steps = self.default_epochs * self.steps_per_epoch
        scheduler = self._tried("schedule", lambda: self.make_scheduler(optimizer, steps))
        batch = self._first("train", lambda: next(self.train_batches(0, seed), None))
        if made.loss is None or made.evaluate is None:
            part = "loss" if made.loss is None else "evaluate"
            self._check_pair("train", batch, part)
            for split, batches in self._evaluated.items():
                first = partial(next, map(flatten, seeded_epoch(batches, 0, 0)), None)
                self._check_pair(split, self._first(split, first), part)
        classes = self._outputs(model, *batch) if made.loss is None else None
        model.train()
        loss = self._tried("loss", lambda: self.loss(model, batch))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss of workload {name} must return the mean loss, a tensor with one number, got {got}")
        if not loss.requires_grad:
            raise UserError(
                f"loss of workload {name} must depend on the model's parameters, got one without a gradient"
            )
        self._tried("loss", loss.backward)
        self._tried("optimizer", optimizer.step)
        rates = []
        for _ in range(self.steps_per_epoch):
            self._tried("schedule", scheduler.step)
            rates.append(max(float(rate) for rate in scheduler.get_last_lr()))
        if self.default_epochs > 1 and rates[-1] < _SMALL_RATE * max(rates):
            warnings.warn(
                f"schedule of workload {name} is stepped after each step, not after each epoch, and the learning rate "
                f"is {rates[-1]:.2g} after the first of {self.default_epochs} epochs: give its lengths in steps",
                stacklevel=2,
            )
        model.eval()
        with torch.no_grad():
            for split, batches in self._evaluated.items():
                some = list(islice(seeded_epoch(batches, 0, 0), 1))
                self._tried("evaluate", partial(self._evaluate_on, some, split, model, torch.device("cpu")))
        return classes

    def _tried(self, part: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's functions may raise anything
            text = str(error).strip().splitlines()
            raise UserError(
                f"{part} of workload {self.name} raised {type(error).__name__}: {text[0] if text else 'no message'}; "
                "--debug shows where"
            ) from error

    def _first(self, split: str, take: Callable[[], Any]) -> Batch:
        found: Batch | None = self._tried(split, take)
        if found is None or len(found[0]) == 0:
            raise UserError(f"{split} of workload {self.name} is empty")
        return found

    def _check_pair(self, split: str, batch: Batch, part: str) -> None:
        if len(batch) != 2:
            raise UserError(
                f"{part} of workload {self.name} must be given, for its default takes batches (inputs, targets), and "
                f"those of {split} hold {len(batch)} tensors"
            )
        if len(batch[0]) != len(batch[1]):
            raise UserError(
                f"a batch of workload {self.name} must have as many targets as inputs, got {len(batch[1])} and "
                f"{len(batch[0])} in {split}"
            )

    def _outputs(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
        """Return the number of the model's classes, and check the targets."""
        with torch.no_grad():
            outputs = self._tried("model", lambda: model(inputs))
        if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != len(inputs):
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UserError(
                f"model of workload {self.name} must return (batch, classes) for the default loss, got {got} for "
                f"{len(inputs)} inputs: give loss, too"
            )
        self._check_labels(targets, int(outputs.shape[1]))
        return int(outputs.shape[1])
