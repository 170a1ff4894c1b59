"""Builds the components and policies of a schedule for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy
from trainables.compression.distillation.teacher import build_teacher
from trainables.compression.lr_schedulers import build_lr_scheduler
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
from trainables.compression.schedule import ModelFacts, PlannedPolicy, PrunerPolicyConfig, Schedule, resolve
from trainables.compression.schedule.distiller_configs import KnowledgeDistillationConfig
from trainables.compression.schedule.timing import Timing
from trainables.compression.thinning import Kind
from trainables.compression.thinning.extra import check_installed
from trainables.errors import UserError

#: Structures that each extension removes.
_REMOVES: dict[str, Kind] = {"FilterRemover": "filters", "ChannelRemover": "channels", "StructureRemover": "structures"}


class PolicySet(Protocol):
    """Object to which policies are added: a `scheduler.CompressionScheduler`."""

    @property
    def model(self) -> nn.Module:
        """Return the model whose parameters the policies act on."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the model's optimizer."""

    def schedule(self, policy: Any, timing: Timing, *, component: str | None = None) -> None:
        """Add a policy with its timing."""

    def add_component(self, name: str, component: Any) -> None:
        """Add a component whose state is part of the scheduler's state."""


def model_facts(model: nn.Module) -> ModelFacts:
    """Return the facts of a model that a schedule's names are matched with."""
    return ModelFacts(
        parameters={name: tuple(p.shape) for name, p in parameters_as_built(model).items()},
        modules={name: type(module).__name__ for name, module in model.named_modules() if name},
    )


def add_policies(
    scheduler: PolicySet,
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
        UserError: the model does not have a name, or a component does not fit the model.
    """
    schedule = resolve(schedule, model_facts(scheduler.model), compatible=compatible).schedule
    built: dict[str, Any] = {}
    for planned in schedule.policies:
        name, policy = _policy(scheduler, schedule, planned, built, seed, make_model, base_lrs)
        scheduler.schedule(policy, planned.timing, component=name)


def _policy(
    scheduler: PolicySet,
    schedule: Schedule,
    planned: PlannedPolicy,
    built: dict[str, Any],
    seed: int,
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> tuple[str | None, Policy]:
    """Return the name of the policy's component in the scheduler's state (None without state), and the policy."""
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
        args = planned.args if isinstance(planned.args, PrunerPolicyConfig) else PrunerPolicyConfig()
        if args.levels is not None:
            name = f"{name}@{planned.position}"  # its own levels require a separate pruner
            settings = with_levels(settings, args.levels)
        return name, PruningPolicy(once(lambda: build_pruner(component.name, settings, model, seed=seed)), args)
    if planned.kind == "regularizer":
        regularizer = build_regularizer(component.name, settings, model)
        return None, RegularizationPolicy(regularizer, keep_mask=bool(getattr(planned.args, "keep_mask", False)))
    if planned.kind == "quantizer":
        if name not in built:  # its state is part of the policy's state
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
        check_installed()  # fail now instead of epochs later
        return None, ThinningPolicy(_REMOVES[component.class_name], round_to=int(getattr(settings, "round_to", 1)))
    assert isinstance(settings, KnowledgeDistillationConfig)
    return None, DistillationPolicy(lambda: _distillation(model, settings, make_model))


def with_levels(settings: Any, levels: Any) -> Any:
    """Return a level pruner's settings with the policy's own levels.

    Raises:
        UserError: the pruner has no levels.
    """
    there = getattr(settings, "levels", None)
    if there is None:
        raise UserError(f"levels are arguments for SparsityLevelParameterPruner, got them for {settings.class_}")
    new = levels if isinstance(levels, dict) else dict.fromkeys(there, levels)
    return settings.model_copy(update={"levels": new})


def _distillation(
    model: nn.Module, settings: KnowledgeDistillationConfig, make_model: Callable[[], nn.Module] | None
) -> KnowledgeDistillationPolicy:
    weights = DistillationLossWeights(settings.distill_weight, settings.student_weight, settings.teacher_weight)
    teacher = build_teacher(settings, model, make_model)
    return KnowledgeDistillationPolicy(model, teacher, settings.temperature, weights)
