"""Functions that build each pruner from its arguments, for the parameters of a model.

`trainables.compression.schedule.pruner_configs.PRUNER_ROWS` maps classes to functions. All take the settings, the
model, and a generator for random numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from trainables.compression.component import Pruner
from trainables.compression.masks import parameters_as_built
from trainables.compression.pruners.activation_watch import convolutions
from trainables.compression.pruners.levels import LevelPruner, constant_share, share_of
from trainables.compression.pruners.random_filters import BernoulliPruner, RandomPruner
from trainables.compression.pruners.ranked import NormRankedPruner, StructuredWeights, random_share
from trainables.compression.pruners.recurrent import RecurrentPruner
from trainables.compression.pruners.statistics import ActivationPruner, GradientPruner
from trainables.compression.pruners.structure_thresholds import StructureThresholdPruner
from trainables.compression.pruners.surgery import SplicingPruner
from trainables.compression.pruners.thresholds import MagnitudePruner, SensitivityPruner
from trainables.compression.schedule import pruner_configs as configs
from trainables.compression.schedule.names import assigned, listed
from trainables.compression.structures import Structures, ranked_group, structures_of


def by_sensitivity(s: configs.SensitivityPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of elements below s standard deviations."""
    return SensitivityPruner(assigned(s.sensitivities, _names(model)))


def by_magnitude(s: configs.MagnitudeParameterPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of elements below a given threshold."""
    return MagnitudePruner(assigned(s.thresholds, _names(model)))


def by_level(s: configs.SparsityLevelParameterPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of a given share of the elements."""
    levels = assigned(s.levels, _names(model))
    return LevelPruner({parameter: constant_share(level) for parameter, level in levels.items()})


def by_gradual_level(s: configs.AutomatedGradualPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of a growing share of the elements."""
    return LevelPruner(dict.fromkeys(listed(s.weights, _names(model)), share_of(s)))


def by_surgery(s: configs.SplicingPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner that restores weights that have grown again."""
    return SplicingPruner(
        assigned(s.sensitivities, _names(model)),
        low=s.low_thresh_mult,
        high=s.hi_thresh_mult,
        growth=s.sensitivity_multiplier,
    )


def by_recurrent_threshold(s: configs.BaiduRNNPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner whose threshold rises along two straight lines."""
    return RecurrentPruner(
        listed(s.weights, _names(model)), q=s.q, ramp_from=s.ramp_from, slope_factor=s.ramp_slope_mult
    )


def by_structure_threshold(s: configs.StructureParameterPrunerConfig, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of structures below a given threshold."""
    parameters = parameters_as_built(model)
    regimes = {}
    for parameter, (threshold, group_type) in assigned(s.reg_regims, tuple(parameters)).items():
        structures = structures_of(group_type)
        structures.check(parameter, parameters[parameter].shape)
        regimes[parameter] = (threshold, structures)
    return StructureThresholdPruner(regimes, s.threshold_criteria)


def by_l1_norm(s: Any, model: nn.Module, generator: torch.Generator) -> Pruner:
    """Build the pruner of the structures with the smallest L1 norm."""
    return _by_norm(s, model, generator, order=1)


def by_l2_norm(s: Any, model: nn.Module, generator: torch.Generator) -> Pruner:
    """Build the pruner of the structures with the smallest L2 norm."""
    return _by_norm(s, model, generator, order=2)


def _by_norm(s: Any, model: nn.Module, generator: torch.Generator, *, order: Literal[1, 2]) -> Pruner:
    return NormRankedPruner(
        _ranked_structures(s, model),
        share_of(s),
        order=order,
        group_size=s.group_size,
        noise=s.noise,
        generator=generator,
    )


def by_random_share(
    s: configs.RandomLevelStructureParameterPrunerConfig, model: nn.Module, generator: torch.Generator
) -> Pruner:
    """Build the pruner of a share of the structures, where the share is drawn at each use."""
    share = random_share(*s.sparsity_range, generator)
    return NormRankedPruner(_ranked_structures(s, model), share, order=1, generator=generator)


def by_zero_activations(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of filters whose activations are zero most often."""
    return _by_activations(s, model, "apoz")


def by_mean_activation(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of filters with the smallest mean activation."""
    return _by_activations(s, model, "mean")


def _by_activations(s: Any, model: nn.Module, criterion: Literal["apoz", "mean"]) -> Pruner:
    weights = _filters(s, model)
    convolutions(model, weights.ranked)
    return ActivationPruner(weights, share_of(s), criterion=criterion)


def by_gradient(s: Any, model: nn.Module, _: torch.Generator) -> Pruner:
    """Build the pruner of filters whose removal changes the loss least."""
    return GradientPruner(_filters(s, model), share_of(s))


def at_random(s: Any, model: nn.Module, generator: torch.Generator) -> Pruner:
    """Build the pruner of an exact share of the filters, chosen at random."""
    return RandomPruner(_filters(s, model), share_of(s), generator=generator)


def by_chance(s: Any, model: nn.Module, generator: torch.Generator) -> Pruner:
    """Build the pruner that removes each filter with a given probability."""
    return BernoulliPruner(_filters(s, model), share_of(s), generator=generator)


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
