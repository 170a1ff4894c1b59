"""Pruning: one sensitivity per block of layers, which keeps the number of parameters low in deep models.

Layers of a block (``layer1.0`` of ``layer1.0.conv1.weight``) are pruned in proportion to what each tolerates alone.
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
    return by_layer.ask(trial, context, blocks(context))


def start(context: SpaceContext) -> dict[str, Any]:
    """Return about half of the sensitivity that each block's most robust layer tolerates alone."""
    return by_layer.start_of(context, blocks(context))


SPACE = replace(by_layer.SPACE, name="pruning_sensitivities_by_block", suggest=suggest, start=start)
