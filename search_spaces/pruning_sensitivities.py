"""Pruning: one sensitivity s a layer (``pruning_sensitivities``), what is below s standard deviations goes.

Ranges begin at 0, which prunes nothing, and reach beyond the sensitivity at which a layer alone, pruned in the trained
baseline, stays within the allowed drop (`trainables.compression.sensitivity`). Where that is not known they reach to
`WIDEST`: 87 % of normally distributed weights. Few values a layer: trials that prune alike are trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.compression.schedule.names import block_of

#: Largest sensitivity of a layer of which nothing is known.
WIDEST = 1.5
#: Even a layer that bears nothing alone is pruned a little.
LEAST = 0.2
#: A range reaches so far beyond the sensitivity that the layer alone can bear.
BEYOND = 1.5
#: Values of a range beside 0.
VALUES = 6
#: A parameter's name begins so; dots of the layer's name are slashes in it, for dots part branches from variables.
PREFIX = "s:"


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a sensitivity a layer."""
    return {"pruning_sensitivities": ask(trial, context, [[name] for name in context.weight_names])}


def ask(trial: Suggests, context: SpaceContext, groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A sensitivity for each group of layers, as texts NAME=s, s of the group times what the layer can bear.

    Args:
        trial: that is asked.
        context: of the run.
        groups: weights that share one value; the value is that of the group's most robust layer, the others' are in
            proportion.
    """
    found = []
    for group in groups:
        known = [bearable(context, name) for name in group]
        step = max(0.01, round(BEYOND * max(known) / VALUES, 2))
        value = trial.suggest_float(parameter_of(group), 0.0, round(VALUES * step, 6), step=step)
        for name, bears in zip(group, known, strict=True):
            found.append(f"{name}={round(value * bears / max(known), 4):g}")
    return tuple(found)


def bearable(context: SpaceContext, name: str) -> float:
    """The sensitivity that a layer bears alone; the least that is tried, for retraining mends what pruning does."""
    return max(LEAST, context.sensitivities.get(name, WIDEST / BEYOND))


def parameter_of(group: Sequence[str]) -> str:
    """The parameter of a group of layers."""
    name = group[0] if len(group) == 1 else block_of(group[0])
    return PREFIX + name.replace(".", "/")


def start(context: SpaceContext) -> dict[str, Any]:
    """About half of what each layer alone can bear."""
    return start_of(context, [[name] for name in context.weight_names])


def start_of(context: SpaceContext, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The same for groups."""
    found = {}
    for group in groups:
        most = max(bearable(context, name) for name in group)
        step = max(0.01, round(BEYOND * most / VALUES, 2))
        found[parameter_of(group)] = round(VALUES // 3 * step, 6)
    return found


def notes(context: SpaceContext) -> list[str]:
    """When the space prunes."""
    known = "" if context.sensitivities else "; a search seeds the ranges by a sensitivity analysis of its baseline"
    return [
        "prunes from a fifth to three fifths of the run, every epoch, unless search --set holds other values of "
        f"pruning_start_epoch, pruning_end_epoch and pruning_frequency{known}"
    ]


MEANINGS = {PREFIX: "sensitivity of a layer: what is below so many standard deviations of its weights is pruned"}
SPACE = Space(
    name="pruning_sensitivities",
    method="compression",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings=MEANINGS,
    notes=notes,
    saving="inference",
)
