"""Pruning: one sensitivity s per layer (``pruning_sensitivities``); weights below s standard deviations are pruned.

Ranges begin at 0, which prunes nothing, and extend to `WIDEST`: 87 % of normally distributed weights. There are few
values per layer, because trials that prune alike are trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.compression.schedule.names import block_of
from trainables.savings import SPARSE

#: Largest sensitivity, and the distance of its values.
WIDEST, STEP = 1.5, 0.25
#: Prefix of a parameter's name. Dots of the layer's name become slashes, because dots separate branch and variable.
PREFIX = "s:"


def layers(context: SpaceContext) -> list[list[str]]:
    """Return each weight as a group of its own."""
    return [[name] for name in context.weight_names]


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a sensitivity per layer."""
    return ask(trial, layers(context))


def ask(trial: Suggests, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Ask for a sensitivity per group of weights; return texts NAME=s."""
    found = []
    for group in groups:
        value = trial.suggest_float(parameter_of(group), 0.0, WIDEST, step=STEP)
        found += [f"{name}={value:g}" for name in group]
    return {"pruning_sensitivities": tuple(found)}


def parameter_of(group: Sequence[str]) -> str:
    """Return the parameter's name for a group of layers."""
    name = group[0] if len(group) == 1 else block_of(group[0])
    return PREFIX + name.replace(".", "/")


def start(context: SpaceContext) -> dict[str, Any]:
    """Return a third of the largest sensitivity for each layer."""
    return {parameter_of(group): 2 * STEP for group in layers(context)}


def notes(context: SpaceContext) -> list[str]:
    """Return a line on when the space prunes."""
    return [
        "prunes from a fifth to three fifths of the run, every epoch, unless search --set gives other values of "
        "pruning_start_epoch, pruning_end_epoch and pruning_frequency"
    ]


SPACE = Space(
    name="pruning_sensitivities",
    method="compression",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={PREFIX: "sensitivity of a layer: what is below so many standard deviations of its weights is pruned"},
    notes=notes,
    saving=SPARSE,
)
