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
    found: dict[str, Mapping[str, Any]] = {}
    begin = _Visit(space.name, given=space.start(context))
    found[key_of(space.suggest(begin, context))] = begin.parameters
    for settings, parameters in _all_points(space, context):
        found.setdefault(settings, parameters)
        if len(found) > MOST_POINTS:
            raise UserError(
                f"a grid must have at most {MOST_POINTS} points, space {space.name} has more: search it with another "
                "--sampler, or give the values to try in a grid file (--grid FILE)"
            )
    return tuple(found.values())


def _all_points(space: Space, context: SpaceContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the settings, as `key_of` shows them, and the parameters of all points."""
    if isinstance(space.suggest, GridSuggest):
        for parameters in space.suggest.parameters():  # in the order of the file
            yield key_of(space.suggest(_Visit(space.name, given=parameters), context)), parameters
        return
    path: list[int] | None = []
    while path is not None:
        visit = _Visit(space.name, path=path)
        yield key_of(space.suggest(visit, context)), visit.parameters
        path = visit.next_path()


def _check_finite(space: str, asked: Range) -> None:
    """Raise UserError for a continuous parameter."""
    if asked.choices is None and asked.step is None and asked.low != asked.high:
        raise UserError(
            f"a grid needs finite choices, but {asked.name} of space {space} is continuous ({asked.low:g} .. "
            f"{asked.high:g}): give values to try in a grid file (--grid FILE), or take another --sampler"
        )


class _Visit(Answers):
    """Takes given values, else those at a path of choices, else the first ones."""

    def __init__(self, space: str, *, given: Mapping[str, Any] | None = None, path: Sequence[int] = ()) -> None:
        self._space, self._given = space, given or {}
        self._path = list(path)
        self._sizes: list[int] = []
        self.parameters: dict[str, Any] = {}

    def next_path(self) -> list[int] | None:
        """Return the path of the next visit; None after the last."""
        taken = [*self._path, *[0] * (len(self._sizes) - len(self._path))]
        for place in range(len(taken) - 1, -1, -1):
            if taken[place] + 1 < self._sizes[place]:
                return [*taken[:place], taken[place] + 1]
        return None

    def answer(self, asked: Range) -> Any:
        if asked.name not in self.parameters:  # asked for again, it keeps its value
            if asked.name in self._given:
                self.parameters[asked.name] = self._given[asked.name]
            else:
                values, place = self._values(asked), len(self._sizes)
                self._sizes.append(len(values))
                self.parameters[asked.name] = values[self._path[place] if place < len(self._path) else 0]
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
