"""The doctor: finds what makes a PyTorch training slower than it has to be, measures it, and says how to mend it.

Everything is tried on copies; the process's generators, the model and the optimizer stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.runtime.generators import kept_generators
from trainables.training.doctor.bias_before_norm import (
    StateConverter,
    renumbered,
    without_biases,
)
from trainables.training.doctor.checks import (
    forward_and_backward,
    loading,
    of_model,
    slow_optimizer,
    waits,
    zeroed_to_none,
)
from trainables.training.doctor.findings import Finding, report_text
from trainables.training.doctor.step_watch import StepWatch, zeroed_gradients

#: Batches that are timed, after one that is not.
BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of `doctor`; printed, the whole report."""

    findings: tuple[Finding, ...]
    """Each thing to mend."""
    model: nn.Module | None = None
    """With ``fix=True`` the model without superfluous biases; the same object where there are none."""
    convert: StateConverter | None = None
    """With ``fix=True``: converts a state of the old model to one of the new."""
    parameter_numbers: Mapping[int, int] = field(default_factory=dict)
    """New numbers of the parameters that stay, by their old ones (`CAC_STOP_LAYER_NUM`); empty if none moves."""

    def __str__(self) -> str:
        return report_text(self.findings)


def doctor(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    optimizer: Optimizer | None = None,
    *,
    step: Callable[[Any], Any] | None = None,
    fix: bool = False,
) -> Diagnosis:
    """Find what makes a training slower than it has to be.

    Args:
        model: on the device on which it is trained.
        loader: yields batches: a tensor, or tuples, lists or dicts whose first tensor is the model's input.
        optimizer: of the model.
        step: your own training step, called with a batch; then it is observed, too. Model and optimizer get their
            state back.
        fix: also return the model without biases that a batch norm cancels.

    Raises:
        UserError: the loader is empty, or the model cannot run on its batches.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with kept_generators([device]):
        batches = [] if loader is None else list(islice(iter(loader), 1))
        if loader is not None and not batches:
            raise UserError("the doctor needs a loader with at least one batch, got none")
        inputs = _inputs(batches[0], device) if batches else None
        if inputs is not None:
            _check_runs(model, inputs)
        findings, pairs = of_model(model, inputs, device)
        if optimizer is not None:
            findings += slow_optimizer(optimizer, device)
        if loader is not None:
            share = _waiting_share(model, loader, step, optimizer, device)
            findings += loading(loader, share)
        if step is not None and batches:
            findings += observed_step(model, optimizer, step, batches[0], device)
        mended, convert = (without_biases(model, pairs) if pairs else (model, dict)) if fix else (None, None)
    numbers = renumbered(model, pairs) if pairs else {}
    return Diagnosis(findings=tuple(findings), model=mended, convert=convert, parameter_numbers=numbers)


def _inputs(batch: Any, device: torch.device) -> tuple[Tensor]:
    while not isinstance(batch, Tensor):
        values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
        if not values:
            raise UserError("the doctor needs batches with a tensor, got an empty one")
        batch = values[0]
    return (batch.to(device),)


def _check_runs(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*inputs)
    except Exception as error:  # a model may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the model cannot run on the first tensor of a batch ({said}): give a loader of its inputs"
        ) from error


def _waiting_share(
    model: nn.Module, loader: Iterable[Any], step: Callable[[Any], Any] | None, optimizer: Optimizer | None,
    device: torch.device,
) -> float:  # fmt: skip
    """Return the share of the steps' time that waits for batches."""
    trained = copy.deepcopy(model).train()
    run = (lambda batch: forward_and_backward(trained, _inputs(batch, device))) if step is None else step
    waited = total = 0.0
    with _Kept(model, optimizer):
        batches = iter(loader)
        first = next(batches, None)
        if first is None:  # an iterator, not a loader
            return 0.0
        run(first)  # kernels are chosen, memory grows
        for _ in range(BATCHES):
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            ready = time.perf_counter()
            run(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            waited += ready - begun
            total += time.perf_counter() - begun
    return waited / total if total else 0.0


class _Kept:
    """Give model and optimizer their state back at the block's end."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer

    def __enter__(self) -> None:
        self._gradients = [None if p.grad is None else p.grad.clone() for p in self._model.parameters()]
        self._mode = self._model.training
        self._weights = copy.deepcopy(self._model.state_dict())
        self._state = None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict())

    def __exit__(self, *_: object) -> None:
        self._model.load_state_dict(self._weights)
        self._model.train(self._mode)
        for parameter, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        if self._optimizer is not None and self._state is not None:
            self._optimizer.load_state_dict(self._state)


def observed_step(
    model: nn.Module, optimizer: Optimizer | None, step: Callable[[Any], Any], batch: Any, device: torch.device
) -> Iterator[Finding]:
    """Find what a training step does: waits of the host for the device, gradients set to zero."""
    with _Kept(model, optimizer), zeroed_gradients() as zeroed, StepWatch(device) as watch:
        step(batch)
        step(batch)
    yield from zeroed_to_none(model, zeroed, _inputs(batch, device), device)
    yield from waits(watch.waits, 2)
