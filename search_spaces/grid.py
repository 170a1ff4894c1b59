"""The points of a grid search over a space with finite choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from search_spaces.grid_file import MOST_POINTS, GridSuggest, key_of
from search_spaces.space import Answers, Range, Space, SpaceContext, describe
from trainables.errors import UserError

#: Parameters of each point of a grid, the space's starting point first.
GridPoints = tuple[Mapping[str, Any], ...]


def grid_points(space: Space, context: SpaceContext) -> GridPoints:
    """Return the points of a space: its starting point, then all combinations of its choices, the last varies fastest.

    Points with equal settings count once.

    Raises:
        UserError: a parameter is continuous, or there are more than `MOST_POINTS` points.
    """
    for asked in describe(space, context):  # in all branches, before many points of the first are counted
        _check_finite(space.name, asked)
    begin = _Visit(space.name, space.start(context))
    found = {key_of(space.suggest(begin, context)): begin.parameters}
    if isinstance(space.suggest, GridSuggest):
        points = iter(space.suggest.parameters())  # in the order of the file
    else:
        points = _combinations(space, context, {})
    for parameters in points:
        found.setdefault(key_of(space.suggest(_Visit(space.name, parameters), context)), parameters)
        if len(found) > MOST_POINTS:
            raise UserError(
                f"a grid must have at most {MOST_POINTS} points, space {space.name} has more: search it with another "
                "--sampler, or give the values to try in a grid file (--grid FILE)"
            )
    return tuple(found.values())


def _combinations(space: Space, context: SpaceContext, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of all points that have the given ones."""
    visit = _Visit(space.name, given)
    space.suggest(visit, context)
    if visit.open is None:
        yield visit.parameters
        return
    name, values = visit.open
    for value in values:
        yield from _combinations(space, context, {**given, name: value})


def _check_finite(space: str, asked: Range) -> None:
    """Raise UserError for a continuous parameter."""
    if asked.choices is None and asked.step is None and asked.low != asked.high:
        raise UserError(
            f"a grid needs finite choices, but {asked.name} of space {space} is continuous ({asked.low:g} .. "
            f"{asked.high:g}): give values to try in a grid file (--grid FILE), or take another --sampler"
        )


class _Visit(Answers):
    """Takes given values, else the first ones."""

    def __init__(self, space: str, given: Mapping[str, Any]) -> None:
        self._space, self._given = space, given
        self.parameters: dict[str, Any] = {}
        self.open: tuple[str, Sequence[Any]] | None = None
        """The first parameter that was not given, and its values."""

    def answer(self, asked: Range) -> Any:
        if asked.name not in self.parameters:  # asked for again, it keeps its value
            if asked.name in self._given:
                self.parameters[asked.name] = self._given[asked.name]
            else:
                values = self._values(asked)
                self.open = self.open or (asked.name, values)
                self.parameters[asked.name] = values[0]
        return self.parameters[asked.name]

    def _values(self, asked: Range) -> Sequence[Any]:
        if asked.choices is not None:
            return asked.choices
        if asked.integer:
            return range(asked.low, asked.high + 1, asked.step)
        _check_finite(self._space, asked)
        # As Optuna counts: in decimals, so that 0.1 * 3 is 0.3.
        first, by = Decimal(str(asked.low)), Decimal(str(asked.step or 1))
        count = int((Decimal(str(asked.high)) - first) / by) + 1
        return [float(first + by * number) for number in range(count)]
