"""Sentences on what a search cost. Pure: numbers in, text out."""

from __future__ import annotations

from analysis.formatting import plural
from analysis.metrics.accounting import SearchCost


def full_trainings(equivalents: float) -> str:
    """Return an amount of compute in trainings of the baseline, as text.

    >>> full_trainings(11.83), full_trainings(1.04)
    ('11.8 full trainings', '1.0 full training')
    """
    said = f"{equivalents:.1f}"
    return f"{said} full training{'' if said == '1.0' else 's'}"


def search_cost_line(cost: SearchCost, *, of: str = "Search cost") -> str:
    """Return one sentence on the compute executed, and on the trials' and their outcomes' without sharing if more."""
    line = f"{of}: {full_trainings(cost.dense_equivalents)} for {plural(cost.trials, 'trial')}"
    repeats = cost.outcomes < cost.completed
    line += f" ({plural(cost.outcomes, 'distinct outcome')})" if repeats else ""
    alone, executed = f"{cost.own_equivalents:.1f}", f"{cost.dense_equivalents:.1f}"
    if cost.own_equivalents > cost.dense_equivalents and alone != executed:
        line += f"; trained alone, each from its start, they would have cost {alone}"
        line += f", the outcomes {cost.outcome_equivalents:.1f}" if repeats else ""
    return line + "."
