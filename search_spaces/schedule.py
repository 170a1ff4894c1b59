"""Any compression schedule in YAML whose values are marked ``!search {low: 0.1, high: 0.9}``."""

from __future__ import annotations

from typing import Any

from search_spaces.space import Range, Space, SpaceContext, Suggests
from trainables.compression.schedule.reading import Mark, read_marks
from trainables.savings import INFERENCE, SPARSE, saved_words

#: Prefix of a parameter's name. Dots of a mark's path become slashes, because dots separate branch and variable.
PREFIX = "mark:"


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the value of each mark."""
    values = []
    for name, mark in _marks(context).items():
        value = Range(name=parameter_of(name), integer=mark.integer, **vars(mark)).ask(trial)
        # A choice is matched by its text; a number from a range may be rounded.
        is_number = mark.choices is None and isinstance(value, float)
        values.append(f"{name}={value:.6g}" if is_number else f"{name}={value}")
    return {"schedule_values": tuple(values)} if values else {}


def parameter_of(name: str) -> str:
    """Return the parameter's name for a mark."""
    return PREFIX + name.replace(".", "/")


def _marks(context: SpaceContext) -> dict[str, Mark]:
    return {} if context.schedule is None else dict(read_marks(context.schedule).marks)


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the middle of each range, and the first of the choices."""
    if context.schedule is None:
        return {}
    return {parameter_of(name): value for name, value in read_marks(context.schedule).middles().items()}


def notes(context: SpaceContext) -> list[str]:
    """Return lines on how to give the schedule and on its ranking, if none is given."""
    if context.schedule is not None:
        return []
    return [
        "needs a schedule: search --schedule FILE, with marked values",
        f"one that removes no structures is ranked by {saved_words(SPARSE)}",
    ]


SPACE = Space(
    name="schedule",
    method="compression",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={PREFIX: "a marked value of the schedule, by its path"},
    notes=notes,
    saving=INFERENCE,
)
