"""Pruners: what decides which elements of a model's weights are zero."""

from __future__ import annotations

import torch
from torch import nn

from trainables.compression.component import Pruner
from trainables.compression.masks import parameters_as_built
from trainables.compression.names import assigned, listed
from trainables.compression.pruners.activations import convolutions
from trainables.compression.pruners.levels import LevelPruner, constant_share, share_of
from trainables.compression.pruners.random_filters import BernoulliPruner, RandomPruner
from trainables.compression.pruners.ranked import NormRankedPruner, StructuredWeights, random_share, seeded_generator
from trainables.compression.pruners.recurrent import RecurrentPruner
from trainables.compression.pruners.statistics import ActivationPruner, GradientPruner
from trainables.compression.pruners.structures import StructureParameterPruner, Structures, structures_of
from trainables.compression.pruners.surgery import SplicingPruner
from trainables.compression.pruners.thresholds import MagnitudePruner, SensitivityPruner
from trainables.compression.settings import PRUNERS, Settings
from trainables.compression.settings import pruners as s
from trainables.errors import unknown_name

__all__ = ["build_pruner"]


def build_pruner(name: str, settings: Settings, model: nn.Module, *, seed: int) -> Pruner:
    """The pruner that settings describe, for a model.

    Args:
        name: of the instance in the schedule; chance differs from name to name.
        settings: one of `trainables.compression.settings.PRUNERS`.
        model: whose parameters are meant.
        seed: of everything that is drawn.

    Raises:
        UserError: a name matches no parameter, or a weight has no such structures.
    """
    known = tuple(parameters_as_built(model))
    match settings:
        case s.SensitivityPruner():
            return SensitivityPruner(assigned(settings.sensitivities, known))
        case s.MagnitudeParameterPruner():
            return MagnitudePruner(assigned(settings.thresholds, known))
        case s.SparsityLevelParameterPruner():
            levels = assigned(settings.levels, known)
            return LevelPruner({parameter: constant_share(level) for parameter, level in levels.items()})
        case s.AutomatedGradualPruner():
            return LevelPruner(dict.fromkeys(listed(settings.weights, known), share_of(settings)))
        case s.SplicingPruner():
            return SplicingPruner(
                assigned(settings.sensitivities, known),
                low=settings.low_thresh_mult,
                high=settings.hi_thresh_mult,
                growth=settings.sensitivity_multiplier,
            )
        case s.BaiduRNNPruner():
            return RecurrentPruner(
                listed(settings.weights, known),
                q=settings.q,
                ramp_from=settings.ramp_from,
                slope_factor=settings.ramp_slope_mult,
            )
        case s.StructureParameterPruner():
            return _by_threshold(settings, model)
        case s._LpRanked() | s.RandomLevelStructureParameterPruner():
            return _by_norm(settings, model, seeded_generator(seed, name))
        case s._Filters():
            return _by_filter(settings, model, seeded_generator(seed, name))
    raise unknown_name("pruner class", settings.class_, PRUNERS)


def _by_threshold(settings: s.StructureParameterPruner, model: nn.Module) -> Pruner:
    parameters = parameters_as_built(model)
    regimes = {}
    for parameter, (threshold, group_type) in assigned(settings.reg_regims, tuple(parameters)).items():
        structures = structures_of(group_type)
        structures.check(parameter, parameters[parameter].shape)
        regimes[parameter] = (threshold, structures)
    return StructureParameterPruner(regimes, settings.threshold_criteria)


def _by_norm(
    settings: s._LpRanked | s.RandomLevelStructureParameterPruner, model: nn.Module, generator: torch.Generator
) -> Pruner:
    # Published schedules mean the rows of the transpose, which is what a linear layer multiplies by.
    group_type = "Cols" if settings.group_type == "Rows" else settings.group_type
    structures = structures_of(group_type, settings.kwargs.block_shape if settings.kwargs else None)
    weights = _checked(settings, structures, model)
    if isinstance(settings, s.RandomLevelStructureParameterPruner):
        share = random_share(*settings.sparsity_range, generator)
        return NormRankedPruner(weights, share, order=1, generator=generator)
    assert isinstance(settings, (s._Desired, s._Gradual))
    first = isinstance(settings, (s.L1RankedStructureParameterPruner, s.L1RankedStructureParameterPruner_AGP))
    return NormRankedPruner(
        weights,
        share_of(settings),
        order=1 if first else 2,
        group_size=settings.group_size,
        noise=settings.noise,
        generator=generator,
    )


def _by_filter(settings: s._Filters, model: nn.Module, generator: torch.Generator) -> Pruner:
    weights = _checked(settings, structures_of(settings.group_type), model)
    assert isinstance(settings, (s._Desired, s._Gradual))
    share = share_of(settings)
    match settings:
        case s.ActivationAPoZRankedFilterPruner() | s.ActivationAPoZRankedFilterPruner_AGP():
            convolutions(model, weights.ranked)
            return ActivationPruner(weights, share, criterion="apoz")
        case s.ActivationMeanRankedFilterPruner() | s.ActivationMeanRankedFilterPruner_AGP():
            convolutions(model, weights.ranked)
            return ActivationPruner(weights, share, criterion="mean")
        case s.GradientRankedFilterPruner() | s.GradientRankedFilterPruner_AGP():
            return GradientPruner(weights, share)
        case s.RandomRankedFilterPruner() | s.RandomRankedFilterPruner_AGP():
            return RandomPruner(weights, share, generator=generator)
    return BernoulliPruner(weights, share, generator=generator)


def _checked(settings: s._Structures, structures: Structures, model: nn.Module) -> StructuredWeights:
    parameters = parameters_as_built(model)
    weights = StructuredWeights(
        names=listed(settings.weights, tuple(parameters)),
        structures=structures,
        has_leader=settings.group_dependency == "Leader",
    )
    weights.check({name: parameters[name].shape for name in weights.names})
    return weights
