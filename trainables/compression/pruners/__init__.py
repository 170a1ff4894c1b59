"""Pruners, which decide which elements of a model's weights are zero."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from trainables.compression.pruners.pruner import Pruner
from trainables.compression.pruners.ranked import (
    ActivationMeanPruner,
    ApozPruner,
    BernoulliPruner,
    GradientPruner,
    GradualPruner,
    L2RankedPruner,
    LevelPruner,
    NormRankedPruner,
    RandomPruner,
)
from trainables.compression.pruners.thresholds import (
    MagnitudePruner,
    RecurrentPruner,
    SensitivityPruner,
    SplicingPruner,
    StructureThresholdPruner,
)
from trainables.compression.schedule.configs import PRUNERS, ComponentConfig
from trainables.errors import unknown_name

__all__ = ["build_pruner"]

#: By the class's name in a schedule; ``_AGP`` after it means a share that grows, as the settings say.
CLASSES: dict[str, type[Pruner]] = {
    "SensitivityPruner": SensitivityPruner,
    "MagnitudeParameterPruner": MagnitudePruner,
    "SparsityLevelParameterPruner": LevelPruner,
    "AutomatedGradualPruner": GradualPruner,
    "SplicingPruner": SplicingPruner,
    "BaiduRNNPruner": RecurrentPruner,
    "StructureParameterPruner": StructureThresholdPruner,
    "RandomLevelStructureParameterPruner": NormRankedPruner,
    "L1RankedStructureParameterPruner": NormRankedPruner,
    "L2RankedStructureParameterPruner": L2RankedPruner,
    "ActivationAPoZRankedFilterPruner": ApozPruner,
    "ActivationMeanRankedFilterPruner": ActivationMeanPruner,
    "GradientRankedFilterPruner": GradientPruner,
    "RandomRankedFilterPruner": RandomPruner,
    "BernoulliFilterPruner": BernoulliPruner,
}


def build_pruner(name: str, settings: ComponentConfig, model: nn.Module, *, seed: int) -> Pruner:
    """Build the pruner that settings describe, for a model.

    Args:
        name: of the instance in the schedule; each name has its own random numbers, the same in each process.
        settings: one of `trainables.compression.schedule.configs.PRUNERS`.
        model: the model to prune.
        seed: of all random numbers.

    Raises:
        UserError: a name matches no parameter, or a weight does not have the requested structures.
    """
    kind = CLASSES.get(settings.class_.removesuffix("_AGP"))
    if kind is None:
        raise unknown_name("pruner class", settings.class_, PRUNERS)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return kind(settings, model, torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
