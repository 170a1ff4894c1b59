"""Check for mark values that can never be valid, before a search begins. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice, product

from trainables.compression.schedule.matching import ModelFacts, match_schedule
from trainables.compression.schedule.problems import Path, ScheduleError
from trainables.compression.schedule.reading import CheckLR, examine
from trainables.compression.schedule.search_marks import Mark, MarkedSchedule, Value

#: Tolerance, in steps, within which the upper end counts as on the grid.
_GRID_ROUNDING = 1e-9
#: Number of combinations of the other marks' values that a value is tried with before it is rejected.
_MOST_OTHERS = 256


def check_marks(
    marked: MarkedSchedule, facts: ModelFacts, *, compatible: bool = False, check_lr: CheckLR | None = None
) -> None:
    """Check that every choice of each mark, and both ends of each range, are valid in their place.

    A value is valid if it is with the other marks at their middle, lower or upper ends (the first or last choice), or
    with any of the first `_MOST_OTHERS` combinations of these. Invalid combinations of valid values are no error here:
    a search skips them.

    Args:
        marked: the schedule.
        facts: of the model.
        compatible: as in `read_schedule`.
        check_lr: as in `read_schedule`.

    Raises:
        ScheduleError: with all invalid values.
    """

    def errors(values: Mapping[str, Value], places: list[Path]) -> tuple[str, ...]:
        schedule, findings = examine(marked.filled(values), compatible=compatible, check_lr=check_lr)
        match_schedule(schedule, facts, findings)  # as far as it could be read
        return findings.said(problem for problem in findings.errors if _is_about(problem.path, places))

    values_of = {name: _values(mark) for name, mark in marked.marks.items()}
    wrong: dict[str, None] = {}
    for name, values in values_of.items():
        places = [path for path, other in marked.names.items() if other == name]
        for value in values:
            tried = (errors({**others, name: value}, places) for others in _others(marked, values_of, name))
            first = next(tried)
            if first and all(tried):
                wrong.update(dict.fromkeys(first))
    if wrong:
        raise ScheduleError(list(wrong))


def _others(
    marked: MarkedSchedule, values_of: Mapping[str, tuple[Value, ...]], name: str
) -> Iterator[Mapping[str, Value]]:
    """Yield values of the other marks, the most likely to be valid first."""
    others = {other: values for other, values in values_of.items() if other != name}
    yield marked.middles()
    yield {other: values[0] for other, values in others.items()}
    yield {other: values[-1] for other, values in others.items()}
    for values in islice(product(*others.values()), _MOST_OTHERS):
        yield dict(zip(others, values, strict=True))


def _values(mark: Mark) -> tuple[Value, ...]:
    """Return the choices, or the least and the greatest value."""
    if mark.choices is not None:
        return mark.choices
    assert mark.low is not None
    assert mark.high is not None
    if mark.step is None:
        return (mark.low, mark.high)
    return (mark.low, mark.low + math.floor((mark.high - mark.low) / mark.step + _GRID_ROUNDING) * mark.step)


def _is_about(path: Path, places: list[Path]) -> bool:
    """Return whether a problem's path is one of the places, inside one of them, or contains one of them."""
    return any(path[: len(place)] == place[: len(path)] for place in places)
