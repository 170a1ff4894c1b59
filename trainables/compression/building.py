"""From a schedule that was read to policies on a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy
from trainables.compression.distillation.teacher import build_teacher
from trainables.compression.lr_schedulers import build_lr_scheduler, check_lr_scheduler
from trainables.compression.masks import parameters_as_built
from trainables.compression.policies import (
    DistillationPolicy,
    LRPolicy,
    Policy,
    PruningPolicy,
    QuantizationPolicy,
    RegularizationPolicy,
    ThinningPolicy,
)
from trainables.compression.pruners import build_pruner
from trainables.compression.quantizers import build_quantizer
from trainables.compression.regularizers import build_regularizer
from trainables.compression.schedule import ModelFacts, PrunerArgs, Schedule, read_marks, resolve
from trainables.compression.schedule import Policy as PlannedPolicy
from trainables.compression.schedule.mark_checks import check_marks
from trainables.compression.settings.distillers import KnowledgeDistillation
from trainables.compression.thinning import Kind
from trainables.compression.thinning.extra import check_installed
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.isolation import isolated
from trainables.workloads import build

if TYPE_CHECKING:
    from trainables.compression.scheduler import CompressionScheduler

#: What each extension removes.
_REMOVES: dict[str, Kind] = {"FilterRemover": "filters", "ChannelRemover": "channels", "StructureRemover": "structures"}


def model_facts(model: nn.Module) -> ModelFacts:
    """What a schedule's names are matched with."""
    return ModelFacts(
        parameters={name: tuple(p.shape) for name, p in parameters_as_built(model).items()},
        modules={name: type(module).__name__ for name, module in model.named_modules() if name},
    )


def add_policies(
    scheduler: CompressionScheduler,
    schedule: Schedule,
    *,
    seed: int,
    compatible: bool,
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> None:
    """Build the components and add the policies of a schedule, in its order.

    Args: see `CompressionScheduler.from_schedule`.

    Raises:
        UserError: names that the model does not have, or a component that does not fit it.
    """
    schedule = resolve(schedule, model_facts(scheduler.model), compatible=compatible).schedule
    built: dict[str, Any] = {}
    for planned in schedule.policies:
        name, policy = _policy(scheduler, schedule, planned, built, seed, make_model, base_lrs)
        scheduler.schedule(policy, planned.timing, component=name)


def facts_of_run(base: TrialConfig) -> ModelFacts:
    """Return what a schedule may be checked against of the model that a run trains; nothing is trained."""
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
        file: where a part of it came from; what is wrong with its names is told with its lines.
        compatible: whether names that match nothing are left out with a warning.
        every_mark: whether all choices of the file's marks, and both ends of their ranges, must fit.

    Raises:
        UserError: the schedule is wrong, does not fit the model, or its teacher cannot be built.
    """
    from trainables.compression.scheduler import CompressionScheduler

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


def _policy(
    scheduler: CompressionScheduler,
    schedule: Schedule,
    planned: PlannedPolicy,
    built: dict[str, Any],
    seed: int,
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> tuple[str | None, Policy]:
    """The name of the policy's component in the scheduler's state, None for one without memory; and the policy."""
    component = schedule.component(planned)
    name = f"{component.section}.{component.name}"
    settings: Any = component.settings
    model = scheduler.model

    def once(make: Callable[[], Any]) -> Any:
        if name not in built:
            built[name] = make()
            scheduler.add_component(name, built[name])
        return built[name]

    if planned.kind == "pruner":
        args = planned.args if isinstance(planned.args, PrunerArgs) else PrunerArgs()
        if args.levels is not None:
            name = f"{name}@{planned.position}"  # with levels of its own it is another pruner
            settings = with_levels(settings, args.levels)
        return name, PruningPolicy(once(lambda: build_pruner(component.name, settings, model, seed=seed)), args)
    if planned.kind == "regularizer":
        regularizer = build_regularizer(component.name, settings, model)
        return None, RegularizationPolicy(regularizer, keep_mask=bool(getattr(planned.args, "keep_mask", False)))
    if planned.kind == "quantizer":
        if name not in built:  # its memory is the policy's
            built[name] = QuantizationPolicy(build_quantizer(component.name, settings, model))
        return None, built[name]
    if planned.kind == "lr_scheduler":
        if scheduler.optimizer is None:
            raise UserError("a schedule with lr_schedulers needs an optimizer, got none")
        optimizer = scheduler.optimizer
        made = once(
            lambda: build_lr_scheduler(component.class_name, dict(component.arguments), optimizer, base_lrs=base_lrs)
        )
        return name, LRPolicy(made)
    if planned.kind == "extension":
        check_installed()  # now, and not epochs later
        return None, ThinningPolicy(_REMOVES[component.class_name], round_to=int(getattr(settings, "round_to", 1)))
    assert isinstance(settings, KnowledgeDistillation)
    return None, DistillationPolicy(lambda: _distillation(model, settings, make_model))


def with_levels(settings: Any, levels: Any) -> Any:
    """A level pruner's settings with a policy's own levels.

    Raises:
        UserError: the pruner has no levels.
    """
    there = getattr(settings, "levels", None)
    if there is None:
        raise UserError(f"levels are arguments for SparsityLevelParameterPruner, got them for {settings.class_}")
    new = levels if isinstance(levels, dict) else dict.fromkeys(there, levels)
    return settings.model_copy(update={"levels": new})


def _distillation(
    model: nn.Module, settings: KnowledgeDistillation, make_model: Callable[[], nn.Module] | None
) -> KnowledgeDistillationPolicy:
    weights = DistillationLossWeights(settings.distill_weight, settings.student_weight, settings.teacher_weight)
    teacher = build_teacher(settings, model, make_model)
    return KnowledgeDistillationPolicy(model, teacher, settings.temperature, weights)
