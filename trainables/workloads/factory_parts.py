"""Parts that a user's workload function returns, and checks of the parts and of their defaults.

The function returns a dict, or any object with attributes, of the parts below; only ``model``, ``train`` and
``validation`` have no default.

    model        () -> nn.Module: a fresh model, on the CPU; called after the trial's seed was set
    train        batches of an epoch: a DataLoader, or anything that can be iterated anew each epoch; or a function
                 (epoch, seed) -> batches. A batch is a tensor, or tuples, lists, dicts of tensors
    validation   batches on which the search evaluates trials
    test         batches that are read once, after the last epoch. None: reports show only the validation accuracy
    loss         (model, batch) -> Tensor: mean loss of a batch. By default cross entropy of ``model(inputs)`` and
                 ``targets``, for batches (inputs, targets)
    evaluate     (model, batches, device) -> float, or a dict of several metrics by name. By default the share of
                 targets equal to the index of the model's largest output
    metric       name of what ``evaluate`` returns, or of the one in the dict that trials are compared by; by default
                 ``accuracy``, which is higher where better and 1 at most
    direction    ``min`` where a smaller metric is better, ``max`` where a larger one is; by default what its name says
    unit         of the metric, in words; ``fraction`` is shown in percent and points
    optimizer    (named_parameters) -> Optimizer. By default SGD, lr 0.1, momentum 0.9, weight decay 5e-4
    schedule     (optimizer, total_steps) -> LRScheduler, stepped after each step. By default cosine to 0
    epochs       passes over the data, >= 1; by default 30
    steps_per_epoch   batches per epoch, needed where ``train`` has no length
    fingerprint  text that changes when the data does. By default from the first batches and the numbers of batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainables.errors import UserError, unknown_name
from trainables.quality import Quality


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
