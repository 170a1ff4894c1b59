"""Check a schedule on the model of a run before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainables.compression.factory import model_facts
from trainables.compression.lr_schedulers import check_lr_scheduler
from trainables.compression.policies import DistillationPolicy
from trainables.compression.schedule import ModelFacts, read_marks, resolve
from trainables.compression.schedule.mark_checks import check_marks
from trainables.compression.scheduler import CompressionScheduler
from trainables.config import TrialConfig
from trainables.runtime.isolation import isolated
from trainables.workloads import build


def facts_of_run(base: TrialConfig) -> ModelFacts:
    """Return the facts of a run's model that a schedule is checked against; nothing is trained."""
    workload = build(base.workload, base.options)
    with isolated(seed=base.seed, threads=base.threads):
        return model_facts(workload.make_model())


def check_on_model(
    schedule: Mapping[str, Any],
    base: TrialConfig,
    file: Path | None = None,
    *,
    compatible: bool = False,
    every_mark: bool = False,
) -> None:
    """Build everything that a schedule describes once, on the model of a run.

    Args:
        schedule: plain mapping.
        base: configuration of the run; nothing is trained.
        file: the file from which a part of the schedule was read; problems with names are reported with its lines.
        compatible: whether names that match nothing are left out with a warning.
        every_mark: whether all choices of the file's marks, and both ends of their ranges, must fit.

    Raises:
        UserError: the schedule is invalid, does not fit the model, or its teacher cannot be built.
    """
    workload = build(base.workload, base.options)
    with isolated(seed=base.seed, threads=base.threads):
        model = workload.make_model()
        if file is not None:
            marked = read_marks(file)
            read = marked.read(marked.middles(), compatible=compatible, check_lr=check_lr_scheduler)
            resolve(read, model_facts(model), compatible=compatible)
            if every_mark:
                check_marks(marked, model_facts(model), compatible=compatible, check_lr=check_lr_scheduler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = CompressionScheduler.from_schedule(
            model, optimizer, schedule, seed=base.seed, compatible=compatible, make_model=workload.make_model
        )
        for scheduled in scheduler.policies:
            if isinstance(scheduled.policy, DistillationPolicy):
                scheduled.policy.look(scheduler.training)
        scheduler.close()
