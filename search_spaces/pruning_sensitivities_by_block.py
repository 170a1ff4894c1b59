"""Pruning: one sensitivity per block of layers, which keeps the number of parameters low in deep models.

``layer1.0`` is the block of ``layer1.0.conv1.weight``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces import pruning_sensitivities as by_layer
from search_spaces.space import SpaceContext, Suggests
from trainables.compression.schedule.names import block_of


def blocks(context: SpaceContext) -> list[list[str]]:
    """Return the weights of each block, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in context.weight_names:
        found.setdefault(block_of(name), []).append(name)
    return list(found.values())


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a sensitivity per block."""
    return by_layer.ask(trial, blocks(context))


def start(context: SpaceContext) -> dict[str, Any]:
    """Return a third of the largest sensitivity for each block."""
    return {by_layer.parameter_of(block): 2 * by_layer.STEP for block in blocks(context)}


SPACE = replace(by_layer.SPACE, name="pruning_sensitivities_by_block", suggest=suggest, start=start)
