"""Gradient-Skip in manual mode: how many stops, through which layers, at which iterations.

The layers are the workload's own: the ends of its units, without one that would leave nothing to train. Stops are
asked for one by one and then sorted, so that every answer is a valid pair of ascending lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from search_spaces.auto_thresholds import suggest_braking
from search_spaces.space import Branch, Space, SpaceContext, Suggests, branch_name
from trainables.gradskip.settings import OFF_FIELD

#: Maximum number of stops in one run.
MOST_STOPS = 3


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the number of stops, for the depth and iteration of each, and for a braking distance."""
    ends = stoppable(context)
    if not ends:
        return dict(OFF_FIELD)  # no layer may stop
    count = trial.suggest_categorical("stops", tuple(range(1, min(MOST_STOPS, len(ends)) + 1)))
    asked = [_ask(Branch(trial, f"stop{number}"), context, len(ends)) for number in range(1, count + 1)]
    stops = in_order(asked)
    return {
        "CAC_STOP_LAYER_NUM": tuple(ends[depth] for depth, _ in stops),
        "CAC_STOP_LAYER_ITR": tuple(iteration for _, iteration in stops),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def _ask(trial: Suggests, context: SpaceContext, layers: int) -> tuple[int, int]:
    depth = trial.suggest_int("depth", 0, layers - 1)
    return depth, trial.suggest_int("CAC_STOP_LAYER_ITR", 0, context.total_steps - 1)


def stoppable(context: SpaceContext) -> tuple[int, ...]:
    """Return the numbers of the parameters through which a stop may reach, by depth.

    They are the ends of units if these are known, else all but the last parameter.
    """
    return context.unit_ends or tuple(range(len(context.layer_names) - 1))


def in_order(stops: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return stops (depth, iteration) with both strictly ascending: the shallowest at the earliest iteration.

    Of stops at one iteration the deepest is kept, of stops at one depth the earliest; the others would have no effect.

    >>> in_order([(2, 50), (0, 90), (2, 10)])
    [(0, 10), (2, 50)]
    """
    stops = list(stops)
    kept: list[tuple[int, int]] = []
    for depth, iteration in zip(sorted(d for d, _ in stops), sorted(i for _, i in stops), strict=True):
        if kept and depth == kept[-1][0]:
            continue
        if kept and iteration == kept[-1][1]:
            kept.pop()
        kept.append((depth, iteration))
    return kept


def start(context: SpaceContext) -> dict[str, Any]:
    """Return one stop halfway through the model and the run; manual mode has no published defaults."""
    ends = stoppable(context)
    if not ends:
        return {}
    return {
        "stops": 1,
        branch_name("stop1", "depth"): (len(ends) - 1) // 2,
        branch_name("stop1", "CAC_STOP_LAYER_ITR"): context.total_steps // 2,
        "CAC_BRAKING_DISTANCE": 0,
    }


def by_depth(context: SpaceContext, ends: Iterable[int]) -> list[str]:
    """Return a line for each depth, with the parameter that a stop there reaches through."""
    names = dict(enumerate(context.layer_names))
    return [f"  {depth}: {names.get(end, '?')} (CAC_STOP_LAYER_NUM={end})" for depth, end in enumerate(ends)]


def notes(context: SpaceContext) -> list[str]:
    """Return lines that list the layers by depth."""
    ends = stoppable(context)
    if not ends:
        return ["no layer of this model can stop before its last, so every trial trains as the baseline does"]
    lines = ["layers by depth; a stop at one stops every parameter up to the one named:", *by_depth(context, ends)]
    lines.append("stops are brought in order, the shallowest at the earliest iteration; equal ones count once")
    return lines


SPACE = Space(
    name="manual_layers",
    method="gradskip",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "stops": "how many stops are asked for",
        "depth": "depth of the layer that the stop reaches through, among those listed above",
    },
    notes=notes,
)
