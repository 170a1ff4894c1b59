"""Values of a schedule's marks that can never be, found before a search begins. Without torch."""

from __future__ import annotations

from collections.abc import Mapping

from trainables.compression.schedule.matching import ModelFacts, match_schedule
from trainables.compression.schedule.problems import Path, ScheduleError
from trainables.compression.schedule.reading import CheckLR, examine
from trainables.compression.schedule.search_marks import Mark, MarkedSchedule, Value


def check_marks(
    marked: MarkedSchedule, facts: ModelFacts, *, compatible: bool = False, check_lr: CheckLR | None = None
) -> None:
    """Return whether every choice of each mark, and both ends of each range, may stand where it stands.

    A value is right where it is with the others at their middle, at their lower, or at their upper ends (the first and
    the last choice). What is wrong with other combinations is no fault of a value: a search passes over them.

    Args:
        marked: the schedule.
        facts: of the model.
        compatible: as in `read_schedule`.
        check_lr: as in `read_schedule`.

    Raises:
        ScheduleError: with all values that are wrong.
    """

    def errors(values: Mapping[str, Value], places: list[Path]) -> tuple[str, ...]:
        schedule, findings = examine(marked.filled(values), compatible=compatible, check_lr=check_lr)
        match_schedule(schedule, facts, findings)  # as far as it could be read
        return findings.said(problem for problem in findings.errors if _is_about(problem.path, places))

    values_of = {name: _values(mark) for name, mark in marked.marks.items()}
    lowest = {name: values[0] for name, values in values_of.items()}
    highest = {name: values[-1] for name, values in values_of.items()}
    wrong: dict[str, None] = {}
    for name, values in values_of.items():
        places = [path for path, other in marked.names.items() if other == name]
        for value in values:
            found = [errors({**others, name: value}, places) for others in (marked.middles(), lowest, highest)]
            if all(found):
                wrong.update(dict.fromkeys(found[0]))
    if wrong:
        raise ScheduleError(list(wrong))


def _values(mark: Mark) -> tuple[Value, ...]:
    """The choices, or both ends."""
    if mark.choices is not None:
        return mark.choices
    assert mark.low is not None
    assert mark.high is not None
    return (mark.low, mark.high)


def _is_about(path: Path, places: list[Path]) -> bool:
    """Return whether a problem is of one of the places, of a part of it, or of what it is a part of."""
    return any(path[: len(place)] == place[: len(path)] for place in places)
