"""The doctor: finds what makes a PyTorch training slower than it has to be, measures it, and says how to mend it.

Everything is tried on copies; the process's generators, the model and the optimizer stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.checks import (
    Finding,
    Observation,
    examine,
    forward_and_backward,
    report_text,
)
from trainables.training.doctor.observation import ModelCall, NetworkCalls, StepWatch, call_from_batch, zeroed_gradients

#: Batches that are timed, after one that is not.
BATCHES = 8
#: Steps in which the networks' calls are recorded, and then those in which a device's work is watched.
RECORDED, WATCHED = 2, 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of `doctor`; printed, the whole report."""

    findings: tuple[Finding, ...]
    """Each thing to mend."""

    def __str__(self) -> str:
        return report_text(self.findings)


def doctor(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: Callable[[Any], Any] | None = None,
) -> Diagnosis:
    """Find what makes a training slower than it has to be.

    Args:
        model: on the device on which it is trained; several networks that train together in an nn.ModuleList.
        loader: yields batches: tensors, tuples, lists or dicts. Without ``step`` the model is called with the values
            whose names or places fit its arguments, or with the first tensor.
        optimizer: of the model, or all of them.
        step: your own training step, called with a batch; then it is observed, too, and the model is looked at with
            the arguments that the step gives it. Model and optimizers get their state back.

    Raises:
        UserError: the loader is empty, or the model cannot run on its batches.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    known: dict[str, Any] = {"networks": {model: None}}
    with kept_generators([device]):
        if loader is not None:
            batch = next(iter(loader), None)
            if batch is None:
                raise UserError("the doctor needs a loader with at least one batch, got none")
            copied = copy.deepcopy(model).train()

            def passes(batch: Any) -> None:
                forward_and_backward(copied, call_from_batch(model, batch).detached(device))

            with _state_kept(model, optimizers):
                if step is None:
                    known = {"networks": {model: _tried_call(model, batch, device)}}
                else:
                    known = _observed_step(model, step, batch, device)
            with _state_kept(model, optimizers):
                share = waiting_share(loader, step or passes, device)
            known |= {"loader": loader, "loader_share": share}
        return Diagnosis(findings=tuple(examine(Observation(device=device, optimizers=optimizers, **known))))


def _tried_call(model: nn.Module, batch: Any, device: torch.device) -> ModelCall:
    """Return the call that a batch suggests; UserError where the model raises."""
    call = call_from_batch(model, batch).detached(device)
    try:
        with torch.no_grad():
            call(copy.deepcopy(model))
    except Exception as error:  # a model may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the model cannot run on what the batch seems to hold for it ({said}): give step=, your training step, or "
            "a loader of the model's inputs"
        ) from error
    return call


def _observed_step(model: nn.Module, step: Callable[[Any], Any], batch: Any, device: torch.device) -> dict[str, Any]:
    """Observe a training step; return fields of `Observation`, of the model's own networks where any is called."""
    with zeroed_gradients() as zeroed, NetworkCalls().recorded() as calls, StepWatch(device) as watch:
        for _ in range(WATCHED):
            watch.steps += 1
            step(batch)
    own = set(model.modules())
    called = {network: call for network, call in calls.by_network.items() if network in own}
    return {"networks": called or {model: None}, "watch": watch, "zeroed": zeroed}


def waiting_share(loader: Iterable[Any], run: Callable[[Any], Any], device: torch.device) -> float:
    """Return the share of the steps' time that waits for batches; 0 for an iterator that is used up.

    Args:
        loader: of the training.
        run: one training step with a batch.
        device: of the training.
    """
    waited = total = 0.0
    batches = iter(loader)
    for number in range(1 + BATCHES):
        begun = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        ready = time.perf_counter()
        run(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:  # in the first, kernels are chosen and memory grows
            waited += ready - begun
            total += time.perf_counter() - begun
    return waited / total if total else 0.0


@contextmanager
def _state_kept(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    weights, states = copy.deepcopy(model.state_dict()), [copy.deepcopy(one.state_dict()) for one in optimizers]
    yield
    model.load_state_dict(weights)
    for module, mode in modes.items():
        module.training = mode
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)


def run_findings(config: TrialConfig, loader_share: float | None = None) -> list[Finding]:
    """Train a few steps of a run in our own loop and return what makes it slower than it has to be.

    Args:
        config: of the run.
        loader_share: share of its steps that waits for batches, as `dry_run` measured it.
    """
    from trainables.training.run import TrainingRun

    with TrainingRun(config) as run:
        steps = run.each_step()
        with NetworkCalls().recorded() as calls:
            for _ in islice(steps, RECORDED):
                run.train_step()
        with StepWatch(run.device) as watch:
            for _ in islice(steps, WATCHED):
                watch.steps += 1
                run.train_step()
        run.pause()
        with kept_generators([run.device]):
            seen = Observation(
                device=run.device,
                networks={run.model: calls.by_network.get(run.model)},  # none if the loss calls it in parts
                optimizers=[run.optimizer],
                loader_share=loader_share,
                watch=watch,
            )
            return examine(seen)
