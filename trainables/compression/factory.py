"""Builds the components and policies of a schedule for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from trainables.compression.thinning.coupled import check_installed
from trainables.errors import UserError

#: Structures that each extension removes.
_REMOVES: dict[str, Kind] = {"FilterRemover": "filters", "ChannelRemover": "channels", "StructureRemover": "structures"}


class BuiltPolicy(NamedTuple):
    """A policy of a schedule, built for a model."""

    policy: Policy
    timing: Timing
    name: str | None = None
    """Name of its component in the scheduler's state; None without state."""
    component: Any = None
    """The component, if it has state."""


def model_facts(model: nn.Module) -> ModelFacts:
    """Return the facts of a model that a schedule's names are matched with."""
    return ModelFacts(
        parameters={name: tuple(p.shape) for name, p in parameters_as_built(model).items()},
        modules={name: type(module).__name__ for name, module in model.named_modules() if name},
    )


def build_policies(
    model: nn.Module,
    optimizer: Optimizer | None,
    schedule: Schedule,
    *,
    seed: int,
    compatible: bool,
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> list[BuiltPolicy]:
    """Build the components and policies of a schedule, in its order.

    Args: see `CompressionScheduler.from_schedule`.

    Raises:
        UserError: the model does not have a name, or a component does not fit the model.
    """
    schedule = resolve(schedule, model_facts(model), compatible=compatible).schedule
    built: dict[str, Any] = {}

    def once(name: str, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if name not in built:
            built[name] = make(*arguments, **named)
        return built[name]

    def build(planned: PlannedPolicy) -> BuiltPolicy:
        component, timing = schedule.component(planned), planned.timing
        name = f"{component.section}.{component.name}"
        settings: Any = component.settings
        if planned.kind == "pruner":
            args = planned.args if isinstance(planned.args, PrunerPolicyConfig) else PrunerPolicyConfig()
            if args.levels is not None:
                name = f"{name}@{planned.position}"  # its own levels require a separate pruner
                settings = with_levels(settings, args.levels)
            pruner = once(name, build_pruner, component.name, settings, model, seed=seed)
            return BuiltPolicy(PruningPolicy(pruner, args), timing, name, pruner)
        if planned.kind == "regularizer":
            regularizer = build_regularizer(component.name, settings, model)
            keep_mask = bool(getattr(planned.args, "keep_mask", False))
            return BuiltPolicy(RegularizationPolicy(regularizer, keep_mask=keep_mask), timing)
        if planned.kind == "quantizer":  # its state is part of the policy's state
            quantizing = once(name, lambda: QuantizationPolicy(build_quantizer(component.name, settings, model)))
            return BuiltPolicy(quantizing, timing)
        if planned.kind == "lr_scheduler":
            if optimizer is None:
                raise UserError("a schedule with lr_schedulers needs an optimizer, got none")
            arguments = dict(component.arguments)
            rates = once(name, build_lr_scheduler, component.class_name, arguments, optimizer, base_lrs=base_lrs)
            return BuiltPolicy(LRPolicy(rates), timing, name, rates)
        if planned.kind == "extension":
            check_installed()  # fail now instead of epochs later
            round_to = int(getattr(settings, "round_to", 1))
            return BuiltPolicy(ThinningPolicy(_REMOVES[component.class_name], round_to=round_to), timing)
        return BuiltPolicy(DistillationPolicy(lambda: _distillation(model, settings, make_model)), timing)

    return [build(planned) for planned in schedule.policies]


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
