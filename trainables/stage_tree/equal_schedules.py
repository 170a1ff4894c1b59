"""For how many steps the learning-rate schedules of a run's two lengths set the same, found without training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Container
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainables.config import TrialConfig
from trainables.runtime.isolation import isolated
from trainables.training.recipe.recipe import scale_learning_rates
from trainables.workloads.base import Workload


def equal_schedules(
    config: TrialConfig, workload: Workload, full_epochs: int, *, keep: Container[int] = ()
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Step the schedules of a cut and a full run until they differ, at most to the cut run's end.

    Args:
        config: of the cut run.
        workload: of both.
        full_epochs: of the full run.
        keep: steps before which the state of the cut run's schedule is wanted.

    Returns:
        For how many states, from that before step 0 on, everything that the optimizers' groups have but parameters is
        equal: learning rates, momentum, ...; 0 for a schedule with a ``step`` of the user's, which may act on more than
        groups. And the wanted states of the schedule.

    Raises:
        Exception: whatever the user's model, optimizer or schedule raises.
    """
    kept: dict[int, dict[str, Any]] = {}
    with isolated(seed=config.seed, threads=config.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules are stepped without their optimizers
        model = workload.make_model()
        own, full = (workload.make_optimizer(model.named_parameters()) for _ in range(2))
        last = workload.steps_per_epoch * config.epochs
        schedules = []
        for optimizer, total_steps in ((own, last), (full, workload.steps_per_epoch * full_epochs)):
            scale_learning_rates(optimizer, workload.batch_factor)
            schedules.append(workload.make_scheduler(optimizer, total_steps))
        if not all(map(_acts_on_groups_alone, schedules)):
            return 0, kept
        for step in range(last + 1):
            if not _same(_groups(own), _groups(full)):
                return step, kept
            if step in keep:
                kept[step] = copy.deepcopy(schedules[0].state_dict())
            if step < last:
                for schedule in schedules:
                    schedule.step()
    return last + 1, kept


def _acts_on_groups_alone(schedule: LRScheduler) -> bool:
    """Return whether a schedule, and each that it is made of, is stepped by torch's code."""
    is_torchs = type(schedule).step.__module__ == LRScheduler.__module__
    return is_torchs and all(map(_acts_on_groups_alone, getattr(schedule, "_schedulers", ())))


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors element by element."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
