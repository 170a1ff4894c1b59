"""Pruners, which decide which elements of a model's weights are zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from trainables.compression.component import Pruner
from trainables.compression.masks import parameters_as_built
from trainables.compression.pruners.ranked import (
    ActivationPruner,
    BernoulliPruner,
    GradientPruner,
    LevelPruner,
    NormRankedPruner,
    RandomPruner,
    StructuredWeights,
    constant_share,
    convolutions,
    random_share,
    seeded_generator,
    share_of,
)
from trainables.compression.pruners.thresholds import (
    MagnitudePruner,
    RecurrentPruner,
    SensitivityPruner,
    SplicingPruner,
    StructureThresholdPruner,
)
from trainables.compression.schedule.configs import PRUNERS, ComponentConfig
from trainables.compression.schedule.names import assigned, listed
from trainables.compression.structures import Structures, ranked_group, structures_of
from trainables.errors import unknown_name

__all__ = ["build_pruner"]

#: Builds a pruner from its settings (of `PRUNERS`), the model, and a generator for random numbers.
_Build = Callable[[Any, nn.Module, torch.Generator], Pruner]


def build_pruner(name: str, settings: ComponentConfig, model: nn.Module, *, seed: int) -> Pruner:
    """Build the pruner that settings describe, for a model.

    Args:
        name: of the instance in the schedule; each name has its own random numbers.
        settings: one of `trainables.compression.schedule.configs.PRUNERS`.
        model: the model to prune.
        seed: of all random numbers.

    Raises:
        UserError: a name matches no parameter, or a weight does not have the requested structures.
    """
    if settings.class_ not in _BUILDERS:
        raise unknown_name("pruner class", settings.class_, PRUNERS)
    return _BUILDERS[settings.class_](settings, model, seeded_generator(seed, name))


def _by_level(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    levels = assigned(s.levels, _names(model))
    return LevelPruner({parameter: constant_share(level) for parameter, level in levels.items()})


def _by_surgery(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    return SplicingPruner(
        assigned(s.sensitivities, _names(model)),
        low=s.low_thresh_mult,
        high=s.hi_thresh_mult,
        growth=s.sensitivity_multiplier,
    )


def _by_recurrent_threshold(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    targets = listed(s.weights, _names(model))
    return RecurrentPruner(targets, q=s.q, ramp_from=s.ramp_from, slope_factor=s.ramp_slope_mult)


def _by_structure_threshold(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    parameters = parameters_as_built(model)
    regimes = {}
    for parameter, (threshold, group_type) in assigned(s.reg_regims, tuple(parameters)).items():
        structures = structures_of(group_type)
        structures.check(parameter, parameters[parameter].shape)
        regimes[parameter] = (threshold, structures)
    return StructureThresholdPruner(regimes, s.threshold_criteria)


def _by_norm(s: Any, model: nn.Module, generator: torch.Generator, *, order: Literal[1, 2]) -> Pruner:
    return NormRankedPruner(
        _ranked_structures(s, model),
        share_of(s),
        order=order,
        group_size=s.group_size,
        noise=s.noise,
        generator=generator,
    )


def _by_random_share(s: Any, model: nn.Module, generator: torch.Generator) -> Pruner:
    least, greatest = s.sparsity_range
    share = random_share(least, greatest, generator)
    return NormRankedPruner(_ranked_structures(s, model), share, order=1, generator=generator)


def _by_activations(s: Any, model: nn.Module, _: torch.Generator, *, criterion: Literal["apoz", "mean"]) -> Pruner:
    weights = _filters(s, model)
    convolutions(model, weights.ranked)
    return ActivationPruner(weights, share_of(s), criterion=criterion)


def _names(model: nn.Module) -> tuple[str, ...]:
    return tuple(parameters_as_built(model))


def _filters(s: Any, model: nn.Module) -> StructuredWeights:
    return _checked(s, structures_of(s.group_type), model)


def _ranked_structures(s: Any, model: nn.Module) -> StructuredWeights:
    block = s.kwargs.block_shape if s.kwargs else None
    return _checked(s, structures_of(ranked_group(s.group_type), block), model)


def _checked(s: Any, structures: Structures, model: nn.Module) -> StructuredWeights:
    """Return the weights that the settings name, after checking that all have these structures."""
    parameters = parameters_as_built(model)
    weights = StructuredWeights(
        names=listed(s.weights, tuple(parameters)), structures=structures, has_leader=s.group_dependency == "Leader"
    )
    weights.check({name: parameters[name].shape for name in weights.names})
    return weights


def _with_gradual(name: str, build: _Build) -> dict[str, _Build]:
    return {name: build, f"{name}_AGP": build}


_BUILDERS: dict[str, _Build] = {
    "SensitivityPruner": lambda s, model, _: SensitivityPruner(assigned(s.sensitivities, _names(model))),
    "MagnitudeParameterPruner": lambda s, model, _: MagnitudePruner(assigned(s.thresholds, _names(model))),
    "SparsityLevelParameterPruner": _by_level,
    "AutomatedGradualPruner": lambda s, model, _: LevelPruner(
        dict.fromkeys(listed(s.weights, _names(model)), share_of(s))
    ),
    "SplicingPruner": _by_surgery,
    "BaiduRNNPruner": _by_recurrent_threshold,
    "StructureParameterPruner": _by_structure_threshold,
    "RandomLevelStructureParameterPruner": _by_random_share,
    **_with_gradual("L1RankedStructureParameterPruner", partial(_by_norm, order=1)),
    **_with_gradual("L2RankedStructureParameterPruner", partial(_by_norm, order=2)),
    **_with_gradual("ActivationAPoZRankedFilterPruner", partial(_by_activations, criterion="apoz")),
    **_with_gradual("ActivationMeanRankedFilterPruner", partial(_by_activations, criterion="mean")),
    **_with_gradual("GradientRankedFilterPruner", lambda s, model, _: GradientPruner(_filters(s, model), share_of(s))),
    **_with_gradual(
        "RandomRankedFilterPruner", lambda s, model, rng: RandomPruner(_filters(s, model), share_of(s), generator=rng)
    ),
    **_with_gradual(
        "BernoulliFilterPruner", lambda s, model, rng: BernoulliPruner(_filters(s, model), share_of(s), generator=rng)
    ),
}
