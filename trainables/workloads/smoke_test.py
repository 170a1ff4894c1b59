"""Runs every part of a user's workload once before a search begins, and reports an error in one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainables.errors import UserError
from trainables.workloads.base import Workload
from trainables.workloads.batch_structure import flatten
from trainables.workloads.factory_parts import Parts, check_evaluation, check_labels, hits
from trainables.workloads.seeded_loader import seeded_epoch


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
