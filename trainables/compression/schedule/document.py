"""A schedule's text, file or mapping as plain values with line numbers, and its problems. Does not import torch.

Differences from PyYAML's safe loader: ``1e-4`` is a number (YAML 1.2), keys are text as written, dates are text, and
the only custom tag is ``!search``.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainables.errors import UserError, nearest_name

#: Keys and list positions from the schedule's root to a value.
Path = tuple[str | int, ...]


class ScheduleError(UserError):
    """A schedule that cannot be used, with one line an error in the order of the file.

    The message has the first problem and the number of the others.
    """

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        more = f" (and {len(errors) - 1} more: `schedule check` lists them)" if len(errors) > 1 else ""
        super().__init__(errors[0] + more)

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)  # the message is built again when unpickled


class Problem(NamedTuple):
    """One problem of a schedule: the entry, and the rule, the given value, and how to correct it."""

    path: Path
    text: str


def dotted(path: Path) -> str:
    """Return a path in the form used in messages and names of search ranges.

    >>> dotted(("policies", 0, "pruner"))
    'policies.0.pruner'
    """
    return ".".join(map(str, path))


def line_at(lines: Mapping[Path, int], path: Path) -> int | None:
    """Return the line of a path, or of the nearest enclosing path that has one."""
    enclosing = (path[:length] for length in range(len(path), -1, -1))
    return next((lines[place] for place in enclosing if place in lines), None)


def nearest(given: str, known: Iterable[str]) -> str:
    """Return ``, did you mean 'x'? Valid: ...`` for an unknown name; without the question if no name is similar."""
    names = list(known)
    near = nearest_name(given, names)
    return f"{f', did you mean {near!r}?' if near else '.'} Valid: {', '.join(names)}"


def shown(value: object, length: int = 60) -> str:
    """Return a value as messages show it, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class Findings:
    """Collect problems of a schedule, whose name in messages is ``source``.

    ``lines`` are by path, from 1; ``compatible``: problems that the original language silently accepted are warnings
    instead of errors.
    """

    def __init__(self, source: str, lines: Mapping[Path, int], *, compatible: bool = False) -> None:
        self.source, self.lines, self.compatible = source, lines, compatible
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, path: Path, text: str) -> None:
        """Record an error, with or without the compatibility switch."""
        self.errors.append(Problem(path, text))

    def lenient(self, path: Path, text: str) -> None:
        """Record what the original silently accepted as an error, or as a warning with the compatibility switch."""
        (self.warnings if self.compatible else self.errors).append(Problem(path, text))

    def said(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Return ``FILE:LINE: path: text`` for each problem, in the order of the file."""
        found = sorted(((line_at(self.lines, path) or 0, path, text) for path, text in problems), key=lambda at: at[0])
        return tuple(
            ": ".join(filter(None, (f"{self.source}:{line}" if line else self.source, dotted(path), text)))
            for line, path, text in found
        )

    def raise_or_warn(self) -> None:
        """Raise a `ScheduleError` with all errors; without errors, issue the warnings as `UserWarning`."""
        if self.errors:
            raise ScheduleError(self.said(self.errors))
        for text in self.said(self.warnings):
            warnings.warn(text, UserWarning, stacklevel=3)


SEARCH = "!search"
#: Name in messages of a schedule without a file.
TEXT = "<schedule>"
_YAML = "tag:yaml.org,2002:"
_MERGE = f"{_YAML}merge"
#: Floats of YAML 1.2 that PyYAML (YAML 1.1) reads as text: an exponent without a point or a sign.
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
FLOAT_BEGINS = list("-+.0123456789")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Compose nodes; ten times as fast if PyYAML has libyaml."""


_Loader.add_implicit_resolver(f"{_YAML}float", FLOAT, FLOAT_BEGINS)


class NotYaml(Exception):
    """The text cannot be read as YAML."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line, self.text = line, text


@dataclass(frozen=True)
class SearchTag:
    """A ``!search`` in place of a value, with its definition as written."""

    definition: Any


def search_tags(value: Any, path: Path = ()) -> Iterator[tuple[Path, SearchTag]]:
    """Yield the ``!search`` tags in a value with their paths, in their order."""
    if isinstance(value, SearchTag):
        yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from search_tags(item, (*path, key))


@dataclass(frozen=True)
class Document:
    """The parsed values of a schedule, before they are interpreted."""

    source: str  # name used in messages
    value: Any  # plain values, and a `SearchTag` for each ``!search``
    lines: Mapping[Path, int] = field(default_factory=dict)
    """By path: the line, from 1, of an entry's key, or of a scalar value that is on a separate line; empty for a
    mapping."""
    duplicates: Sequence[Problem] = ()  # keys that are given more than once; the last one is used, as usual in YAML


def compose(text: str, source: str = TEXT) -> Document:
    """Parse the single YAML document of a text.

    NotYaml: the text is not YAML, is empty, has several documents or a value that cannot be read, or a value contains
    itself.
    """
    builder = _Builder()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise NotYaml(None, "is empty: a schedule needs version and policies")
        return Document(source, builder.build(node, ()), builder.lines, builder.duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = "" if mark is None else [*text.splitlines(), ""][min(mark.line, len(text.splitlines()))]
        if "\t" in line[: len(line) - len(line.lstrip())]:
            said += "; YAML is indented by blanks, not by tabs"
        raise NotYaml(None if mark is None else mark.line + 1, f"is not YAML: {said}") from None
    except yaml.YAMLError as error:
        raise NotYaml(None, f"is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise NotYaml(None, "must not nest maps and lists that deep, nor contain itself by an alias") from None


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Builder:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.duplicates: list[Problem] = []
        self._scalars = SafeConstructor()

    def build(self, node: Node, path: Path) -> Any:
        kind = node.tag.removeprefix(_YAML)
        if isinstance(node, ScalarNode):
            self.lines[path] = _line(node)
            value = self._scalar(node, kind)
        else:
            self.lines.setdefault(path, _line(node))
            if kind not in ("map", "seq", SEARCH):
                raise _unknown_tag(node)
            if isinstance(node, MappingNode):
                value = self._mapping(node, path)
            else:
                value = [self.build(item, (*path, position)) for position, item in enumerate(node.value)]
        return SearchTag(value) if node.tag == SEARCH else value

    def _scalar(self, node: ScalarNode, kind: str) -> Any:
        if kind in ("str", "timestamp", "value", SEARCH):
            return node.value
        if kind not in ("null", "bool", "int", "float"):
            raise _unknown_tag(node)
        try:
            return self._scalars.construct_object(node)
        except (ValueError, KeyError):  # such as `!!int x`, or an int of thousands of digits
            raise NotYaml(_line(node), f"has a value that cannot be read as {kind}: {node.value[:60]}") from None

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag == SEARCH:
                what = f"a {SEARCH} range" if key.tag == SEARCH else "a map or list"
                raise NotYaml(_line(key), f"must have text as keys, got {what}")
            if key.value in first and key.tag != _MERGE:
                place = (*path, key.value)
                self.duplicates.append(Problem(place, f"is given twice, first in line {first[key.value]}"))
            first.setdefault(key.value, _line(key))
        values: dict[str, Any] = {}
        for key, value in _entries(node):
            values.pop(key.value, None)
            self.lines[*path, key.value] = _line(key)
            values[key.value] = self.build(value, (*path, key.value))
        return values


def _entries(node: Node) -> list[tuple[ScalarNode, Node]]:
    """Return a map's entries, after those of the maps that ``<<`` names, of which the first counts."""
    if not isinstance(node, MappingNode):
        raise NotYaml(_line(node), "must name another map by <<")
    merged: list[tuple[ScalarNode, Node]] = []
    for key, value in node.value:
        for part in (value.value if isinstance(value, SequenceNode) else [value]) if key.tag == _MERGE else ():
            merged = _entries(part) + merged
    return merged + [(key, value) for key, value in node.value if key.tag != _MERGE]


def _unknown_tag(node: Node) -> NotYaml:
    tag = node.tag.replace(_YAML, "!!")
    return NotYaml(_line(node), f"must hold plain values and {SEARCH} alone, got the unknown tag {tag}")


def open_document(given: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a schedule's YAML: of a path; or the text, if it has several lines or begins with ``{``; or a mapping.

    ScheduleError: the file cannot be read, is not UTF-8, or not YAML.
    """
    if isinstance(given, Mapping):
        return Document(TEXT, plain(given))
    if not isinstance(given, str | os.PathLike):
        raise ScheduleError([f"a schedule must be a file's name, YAML or a map, got {type(given).__name__}"])
    if isinstance(given, str) and ("\n" in given or given.lstrip().startswith("{")):
        source, text = TEXT, given
    else:
        source = str(given)
        try:
            text = pathlib.Path(given).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
            raise ScheduleError([f"{source}:{line}: must be UTF-8 text, got byte 0x{byte:02x}"]) from None
        except (OSError, ValueError) as error:  # a zero byte in the name is a ValueError
            why = getattr(error, "strerror", None) or error
            raise ScheduleError([f"cannot read schedule {source}: {why}"]) from None
    try:
        return compose(text, source)
    except NotYaml as error:
        raise ScheduleError([f"{source}{'' if error.line is None else f':{error.line}'}: {error.text}"]) from None


def plain(value: Any) -> Any:
    """Convert mappings to dicts with text keys and sequences to lists, recursively."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
