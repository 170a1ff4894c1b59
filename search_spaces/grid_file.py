"""Grid files: the settings of a grid search as alternatives, joined grids, products and conditions. Loads no torch.

A grid is a map with one of these keys:

- ``all``: variables with their values; every combination is a point, the last variable varies fastest;
- ``any``: a list of grids; the points of each, one grid after the other;
- ``join``: a list of grids; every point of the first joined with every point of the second, and so on.

A value is a number, text, truth value or a list of them; ``null`` leaves the variable out; ``{value: V, then: GRID}``
joins V with every point of GRID. ``exclude`` beside the outermost key lists variables that are left out of the text by
which tables name a trial. Points with equal settings count once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

from search_spaces.space import Space, SpaceContext, Suggests, branch_name, saving_of
from trainables.compression.schedule.document import Document, NotYaml, Path, compose, dotted, line_at, nearest, shown
from trainables.config import method_of
from trainables.errors import UserError

#: Name of the space of a grid file.
GRID = "grid"
#: Most points of a grid.
MOST_POINTS = 10_000
#: The keys that make a map a grid.
COMBINATIONS = ("any", "join", "all")

Point = dict[str, Any]


def read_grid(text: str, source: str, read: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the points of a grid file as plain values: ``settings``, one map a point, and ``unnamed``.

    Args:
        text: YAML.
        source: its name in messages, such as the file's.
        read: returns the checked value of a variable; raises UserError.

    Raises:
        UserError: the text is no grid; the message has the file, the line and the place in it.
    """
    try:
        document = compose(text, source)
    except NotYaml as error:
        said = f"is empty: a grid needs {_one_of()}" if error.text.startswith("is empty") else error.text
        raise UserError(f"{source}{'' if error.line is None else f':{error.line}'}: {said}") from None
    return _Reader(document, read).grid()


def key_of(settings: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(settings, sort_keys=True)


def _one_of() -> str:
    return f"one of the keys {', '.join(COMBINATIONS[:-1])} and {COMBINATIONS[-1]}"


class _Reader:
    """Expand a document; stop at the first error."""

    def __init__(self, document: Document, read: Callable[[str, Any], Any]) -> None:
        self._document, self._read = document, read
        self._variables: dict[str, None] = {}

    def grid(self) -> dict[str, Any]:
        for path, text in self._document.duplicates:
            self._refuse(path, text)
        value = self._document.value
        excluded: Any = None
        if isinstance(value, dict) and "exclude" in value:
            excluded = value["exclude"]
            value = {key: item for key, item in value.items() if key != "exclude"}
        points = {key_of(point): point for point in self._points(value, ())}
        return {"settings": list(points.values()), "unnamed": self._unnamed(excluded)}

    def _unnamed(self, excluded: Any) -> list[str]:
        names = excluded if isinstance(excluded, list) else [] if excluded is None else [excluded]
        for place, name in enumerate(names):
            if name not in self._variables:
                hint = nearest(str(name), self._variables)
                self._refuse(("exclude", place), f"{shown(name)} is no variable of this grid{hint}")
        return names

    def _points(self, value: Any, path: Path) -> list[Point]:
        if not isinstance(value, dict):
            self._refuse(path, f"a grid must be a map with {_one_of()}, got {shown(value)}")
        for key in value:
            if key == "exclude":
                self._refuse((*path, key), "exclude must stand beside the outermost key: move it there")
            if key not in COMBINATIONS:
                self._refuse(
                    (*path, key), f"unknown key {key!r}{nearest(key, COMBINATIONS)}; variables stand below all"
                )
        if len(value) != 1:
            said = f"got {', '.join(value)}: put them into a join" if value else "got none"
            self._refuse(path, f"a grid must have {_one_of()}, {said}")
        [(kind, parts)] = value.items()
        place = (*path, kind)
        if kind == "all":
            if not isinstance(parts, dict) or not parts:
                self._refuse(place, f"all must map variables to their values, got {shown(parts)}")
            return self._product([self._values(name, parts[name], (*place, name)) for name in parts], place)
        if not isinstance(parts, list) or not parts:
            self._refuse(place, f"{kind} must be a list of grids, got {shown(parts)}")
        grids = [self._points(grid, (*place, number)) for number, grid in enumerate(parts)]
        if kind == "join":
            return self._product(grids, place)
        self._check_size(sum(map(len, grids)), place)
        return [point for grid in grids for point in grid]

    def _values(self, name: str, given: Any, path: Path) -> list[Point]:
        self._variables[name] = None
        if not isinstance(given, list):
            return self._value(name, given, path)
        if not given:
            self._refuse(path, f"{name} must have a value, got an empty list: leave it out, or write null")
        return [point for number, item in enumerate(given) for point in self._value(name, item, (*path, number))]

    def _value(self, name: str, given: Any, path: Path) -> list[Point]:
        if isinstance(given, dict):
            if "value" not in given or not given.keys() <= {"value", "then"}:
                self._refuse(path, f"a conditional value must be {{value: ..., then: GRID}}, got {shown(given)}")
            then = self._points(given["then"], (*path, "then")) if "then" in given else [{}]
            return self._product([[self._setting(name, given["value"], (*path, "value"))], then], path)
        return [self._setting(name, given, path)]

    def _setting(self, name: str, given: Any, path: Path) -> Point:
        if given is None:
            return {}
        try:
            value = self._read(name, given)
        except UserError as error:
            self._refuse(path, str(error))
        return {name: list(value) if isinstance(value, tuple) else value}

    def _product(self, factors: Sequence[Sequence[Point]], path: Path) -> list[Point]:
        self._check_size(math.prod(map(len, factors)), path)
        found = []
        for parts in product(*factors):
            point: Point = {}
            for part in parts:
                if twice := point.keys() & part.keys():
                    self._refuse(path, f"{min(twice)} is set twice in one trial: keep one of them")
                point |= part
            found.append(point)
        return found

    def _check_size(self, size: int, path: Path) -> None:
        if size > MOST_POINTS:
            self._refuse(path, f"a grid must have at most {MOST_POINTS} points, got {size}: leave values out")

    def _refuse(self, path: Path, text: str) -> NoReturn:
        document = self._document
        line = line_at(document.lines, path)
        where = f"{document.source}{'' if line is None else f':{line}'}"
        raise UserError(f"{where}: {f'{dotted(path)}: ' if path else ''}{text}")


@dataclass(frozen=True)
class _Choice:
    """A question whose answer leaves fewer points."""

    name: str
    """The parameter."""
    follows: Mapping[Any, _Choice | int]
    """By answer, of which None leaves the variable out: the next question, or the number of the only point left."""


@dataclass(frozen=True)
class GridSuggest:
    """Ask for the variables that tell the points of a grid file apart; an object that can be sent between processes."""

    settings: tuple[Mapping[str, Any], ...]
    """The points."""
    unnamed: tuple[str, ...]
    """Variables that leave a trial's name."""
    root: _Choice | int
    """The first question."""
    methods: tuple[str, ...] = ()
    """By point: its method, where the points have several."""

    def __call__(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        node = self.root
        while isinstance(node, _Choice):
            node = node.follows[trial.suggest_categorical(node.name, tuple(node.follows))]
        method = {"method": self.methods[node]} if self.methods else {}
        return {**method, **self.settings[node], **({"unnamed": self.unnamed} if self.unnamed else {})}

    def parameters(self) -> list[dict[str, Any]]:
        """Return the parameters of the points, in the order of the file."""
        found = dict(_leaves(self.root, {}))
        return [found[number] for number in range(len(self.settings))]

    def start(self, context: SpaceContext) -> Mapping[str, Any]:
        """Return the parameters of the first point."""
        return self.parameters()[0]


def _leaves(node: _Choice | int, asked: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(node, int):
        yield node, asked
        return
    for choice, follows in node.follows.items():
        yield from _leaves(follows, {**asked, node.name: choice})


def grid_space(grid: Mapping[str, Any]) -> Space:
    """Return the space of the points that `read_grid` returned."""
    settings = tuple(grid["settings"])
    variables = tuple(dict.fromkeys(name for point in settings for name in point))
    method, methods = _methods(settings, variables)
    root = _tree(settings, range(len(settings)), variables, {})
    suggest = GridSuggest(settings, tuple(grid.get("unnamed", ())), root, methods)
    return Space(
        name=GRID,
        method=method,
        suggest=suggest,
        start=suggest.start,
        start_is_published=False,
        saving=saving_of(method, variables) or "training",
        methods_of_points=tuple(dict.fromkeys(methods)),
    )


def _methods(settings: Sequence[Point], variables: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the method of all points, and by point the methods where no one method takes all variables."""
    try:
        return method_of(variables), ()
    except UserError:
        methods = tuple(method_of(point) for point in settings)
        parts = dict.fromkeys(part for method in methods for part in method.split("+") if part != "none")
        return "+".join(parts), methods


def _tree(
    settings: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    variables: Sequence[str],
    names: dict[tuple[str, tuple[Any, ...]], str],
) -> _Choice | int:
    """Return the questions that tell some points apart, by the variables in their order.

    An Optuna parameter should have the same choices in all trials, so a variable with others in another branch is asked
    for under the branch's number: ``2.CAC_VAR_MT_THR``.
    """
    for place, variable in enumerate(variables):
        groups: dict[Any, list[int]] = {}
        for number in numbers:
            value = settings[number].get(variable)
            groups.setdefault(",".join(map(str, value)) if isinstance(value, list) else value, []).append(number)
        if len(groups) == 1:
            continue
        choices = tuple(groups)
        if (variable, choices) not in names:
            alike = sum(name == variable for name, _ in names)
            names[variable, choices] = branch_name(str(alike + 1), variable) if alike else variable
        rest = variables[place + 1 :]
        follows = {choice: _tree(settings, group, rest, names) for choice, group in groups.items()}
        return _Choice(names[variable, choices], follows)
    return numbers[0]
