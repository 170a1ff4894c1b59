"""Pruning: one sensitivity s per layer (``pruning_sensitivities``); weights below s standard deviations are pruned.

Ranges begin at 0, which prunes nothing, and extend beyond the sensitivity at which a layer, pruned alone in the trained
baseline, stays within the allowed accuracy loss (`trainables.compression.sensitivity`). Where that is not known they
extend to `WIDEST`: 87 % of normally distributed weights. There are few values per layer, because trials that prune
alike are trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.compression.schedule.names import block_of

#: Largest sensitivity of a layer whose tolerated sensitivity is not known.
WIDEST = 1.5
#: Smallest tolerated sensitivity that is assumed, so that every layer is pruned a little.
LEAST = 0.2
#: Upper end of a range, as a multiple of the sensitivity that the layer tolerates alone.
BEYOND = 1.5
#: Values of a range besides 0.
VALUES = 6
#: Prefix of a parameter's name. Dots of the layer's name become slashes, because dots separate branch and variable.
PREFIX = "s:"


def layers(context: SpaceContext) -> list[list[str]]:
    """Return each weight as a group of its own."""
    return [[name] for name in context.weight_names]


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a sensitivity per layer."""
    return ask(trial, context, layers(context))


def ask(trial: Suggests, context: SpaceContext, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Ask for a sensitivity per group of weights; return texts NAME=s, s proportional to what the layer tolerates.

    The value that a group shares is that of its most robust layer.
    """
    found = []
    for group in groups:
        step, most = step_of(context, group), max(tolerated(context, name) for name in group)
        value = trial.suggest_float(parameter_of(group), 0.0, round(VALUES * step, 6), step=step)
        found += [f"{name}={round(value * tolerated(context, name) / most, 4):g}" for name in group]
    return {"pruning_sensitivities": tuple(found)}


def tolerated(context: SpaceContext, name: str) -> float:
    """Return the sensitivity that a layer tolerates alone, at least `LEAST`, because retraining recovers losses."""
    return max(LEAST, context.sensitivities.get(name, WIDEST / BEYOND))


def step_of(context: SpaceContext, group: Sequence[str]) -> float:
    """Return the distance of a group's values."""
    return max(0.01, round(BEYOND * max(tolerated(context, name) for name in group) / VALUES, 2))


def parameter_of(group: Sequence[str]) -> str:
    """Return the parameter's name for a group of layers."""
    name = group[0] if len(group) == 1 else block_of(group[0])
    return PREFIX + name.replace(".", "/")


def start(context: SpaceContext) -> dict[str, Any]:
    """Return about half of the sensitivity that each layer tolerates alone."""
    return start_of(context, layers(context))


def start_of(context: SpaceContext, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return about half of the sensitivity that each group's most robust layer tolerates alone."""
    return {parameter_of(group): round(VALUES // 3 * step_of(context, group), 6) for group in groups}


def notes(context: SpaceContext) -> list[str]:
    """Return a line on when the space prunes."""
    known = "" if context.sensitivities else "; a search seeds the ranges by a sensitivity analysis of its baseline"
    return [
        "prunes from a fifth to three fifths of the run, every epoch, unless search --set gives other values of "
        f"pruning_start_epoch, pruning_end_epoch and pruning_frequency{known}"
    ]


SPACE = Space(
    name="pruning_sensitivities",
    method="compression",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={PREFIX: "sensitivity of a layer: what is below so many standard deviations of its weights is pruned"},
    notes=notes,
    saving="inference",
)
