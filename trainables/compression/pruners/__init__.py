"""Pruners, which decide which elements of a model's weights are zero."""

from __future__ import annotations

from torch import nn

from trainables.compression.component import Pruner
from trainables.compression.pruners import builders
from trainables.compression.pruners.ranked import seeded_generator
from trainables.compression.schedule.config_base import ComponentConfig
from trainables.compression.schedule.pruner_configs import PRUNER_ROWS, PRUNERS
from trainables.errors import unknown_name

__all__ = ["build_pruner"]

_BUILDERS = {row.config: getattr(builders, row.build) for row in PRUNER_ROWS}


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
    if type(settings) not in _BUILDERS:
        raise unknown_name("pruner class", settings.class_, PRUNERS)
    pruner: Pruner = _BUILDERS[type(settings)](settings, model, seeded_generator(seed, name))
    return pruner
