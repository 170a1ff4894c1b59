"""The doctor: finds what makes a PyTorch training slower than it has to be, measures it, and says how to mend it.

Everything is tried on copies; the process's generators, the model and the optimizer stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.checks import (
    Finding,
    ModelCall,
    NetworkCalls,
    StateConverter,
    StepWatch,
    call_from_batch,
    clipping,
    forward_and_backward,
    loading,
    of_networks,
    renumbered,
    report_text,
    slow_optimizer,
    waits,
    without_biases,
    zeroed_gradients,
    zeroed_to_none,
)

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
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: Callable[[Any], Any] | None = None,
    fix: bool = False,
) -> Diagnosis:
    """Find what makes a training slower than it has to be.

    Args:
        model: on the device on which it is trained; several networks that train together in an nn.ModuleList.
        loader: yields batches: tensors, tuples, lists or dicts. Without ``step`` the model is called with the values
            whose names or places fit its arguments, or with the first tensor.
        optimizer: of the model, or all of them.
        step: your own training step, called with a batch; then it is observed, too, and the model is looked at with
            the arguments that the step gives it. Model and optimizers get their state back.
        fix: also return the model without biases that a batch norm cancels.

    Raises:
        UserError: the loader is empty, or the model cannot run on its batches.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    findings: list[Finding] = []
    with kept_generators([device]):
        batches = [] if loader is None else list(islice(iter(loader), 1))
        if loader is not None and not batches:
            raise UserError("the doctor needs a loader with at least one batch, got none")
        networks: Mapping[nn.Module, ModelCall | None] = {model: None}
        if step is not None and batches:
            networks, seen = observed_step(model, optimizers, step, batches[0], device)
            findings += seen
        elif batches:
            call = call_from_batch(model, batches[0]).detached(device)
            _check_runs(model, call)
            networks = {model: call}
        for one in optimizers:
            findings += slow_optimizer(one, device)
        if loader is not None:
            copied = copy.deepcopy(model).train()

            def passes(batch: Any) -> None:
                forward_and_backward(copied, call_from_batch(model, batch).detached(device))

            with _Kept(model, optimizers):
                findings += loading(loader, waiting_share(loader, step or passes, device))
        found, by_network = of_networks(networks, device)
        findings += found
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        pairs = {
            f"{names[network]}{layer}": f"{names[network]}{norm}"
            for network, biases in by_network.items()
            for layer, norm in biases.items()
        }
        mended, convert = (without_biases(model, pairs) if pairs else (model, dict)) if fix else (None, None)
    numbers = renumbered(model, pairs) if pairs else {}
    return Diagnosis(findings=tuple(findings), model=mended, convert=convert, parameter_numbers=numbers)


def _check_runs(model: nn.Module, call: ModelCall) -> None:
    try:
        with torch.no_grad():
            call(copy.deepcopy(model))
    except Exception as error:  # a model may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the model cannot run on what the batch seems to hold for it ({said}): give step=, your training step, or "
            "a loader of the model's inputs"
        ) from error


def waiting_share(loader: Iterable[Any], run: Callable[[Any], Any], device: torch.device) -> float:
    """Return the share of the steps' time that waits for batches.

    Args:
        loader: of the training.
        run: one training step with a batch.
        device: of the training.
    """
    waited = total = 0.0
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
    """Give model and optimizers their state back at the block's end."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def __enter__(self) -> None:
        self._gradients = [None if p.grad is None else p.grad.clone() for p in self._model.parameters()]
        self._modes = {module: module.training for module in self._model.modules()}
        self._weights = copy.deepcopy(self._model.state_dict())
        self._states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]

    def __exit__(self, *_: object) -> None:
        self._model.load_state_dict(self._weights)
        for module, mode in self._modes.items():
            module.training = mode
        for parameter, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.load_state_dict(state)


def observed_step(
    model: nn.Module, optimizers: Sequence[Optimizer], step: Callable[[Any], Any], batch: Any, device: torch.device
) -> tuple[Mapping[nn.Module, ModelCall | None], list[Finding]]:
    """Observe a training step.

    Returns:
        The networks that it calls, each with its arguments; the model without arguments where it calls none. And what
        it does: waits of the host for the device, gradients clipped too early or set to zero.
    """
    calls = NetworkCalls()
    with _Kept(model, optimizers), zeroed_gradients() as zeroed, calls.recorded(), StepWatch(device) as watch:
        for _ in range(2):
            watch.begin_step()
            step(batch)
    own = set(model.modules())
    called = {one: call for one, call in calls.by_network.items() if one in own}
    networks: Mapping[nn.Module, ModelCall | None] = called or {model: None}
    return networks, [*zeroed_to_none(networks, zeroed, device), *waits(watch), *clipping(watch)]
