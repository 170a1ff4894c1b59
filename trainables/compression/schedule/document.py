"""A schedule's text, file or mapping as plain values with line numbers. Does not import torch.

Differences from PyYAML's safe loader: ``1e-4`` is a number (YAML 1.2), keys are text as written, dates are text, and
the only custom tag is ``!search``.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainables.compression.schedule.policy_configs import Path, Problem, ScheduleError

#: Largest number of values, counted again for each alias: protects against alias bombs.
MOST_VALUES = 200_000
#: Largest nesting depth of maps and lists.
MOST_NESTED = 50
SEARCH = "!search"
#: Name in messages of a schedule without a file.
TEXT = "<schedule>"
_TOO_MANY = f"must not hold more than {MOST_VALUES} values (behind an alias they count each time)"
_TOO_DEEP = f"must not nest maps and lists more than {MOST_NESTED} deep"
_YAML = "tag:yaml.org,2002:"
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

    source: str
    """Name used in messages."""
    value: Any
    """Plain values, and a `SearchTag` for each ``!search``."""
    lines: Mapping[Path, int] = field(default_factory=dict)
    """By path: the line, from 1, of an entry's key, or of a scalar value that is on a separate line; empty for a
    mapping."""
    duplicates: Sequence[Problem] = ()
    """Keys that are given more than once; the last one is used, as usual in YAML."""


def compose(text: str, source: str = TEXT) -> Document:
    """Parse the single YAML document of a text.

    Raises:
        NotYaml: the text is not YAML, is empty, has several documents, too many values or one that cannot be read, or a
            value contains itself.
    """
    try:
        _check_size(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = "" if mark is None else [*text.splitlines(), ""][min(mark.line, len(text.splitlines()))]
        if "\t" in line[: len(line) - len(line.lstrip())]:
            said += "; YAML is indented by blanks, not by tabs"
        raise NotYaml(None if mark is None else mark.line + 1, f"is not YAML: {said}") from None
    except yaml.YAMLError as error:
        raise NotYaml(None, f"is not YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise NotYaml(None, "is empty: a schedule needs version and policies")
    builder = _Builder()
    value = builder.build(node, ())
    return Document(source, value, builder.lines, builder.duplicates)


def _line(place: Any) -> int:
    """Return the line, from 1, of a node or an event."""
    return int(place.start_mark.line) + 1


def _check_size(text: str) -> None:
    """Raise NotYaml if a text is too deep or too large to compose, since libyaml's recursion has no limit."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        if depth > MOST_NESTED or values > MOST_VALUES:
            raise NotYaml(_line(event), _TOO_DEEP if depth > MOST_NESTED else _TOO_MANY)


class _Builder:
    """Convert YAML nodes to values."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.duplicates: list[Problem] = []
        self._count = 0
        self._scalars = SafeConstructor()
        self._open: set[int] = set()

    def build(self, node: Node, path: Path) -> Any:
        self._count += 1
        if self._count > MOST_VALUES:
            raise NotYaml(_line(node), _TOO_MANY)
        if id(node) in self._open:
            raise NotYaml(_line(node), "must not contain itself by an alias")
        if len(self._open) == MOST_NESTED:  # aliases can nest deeper than the text
            raise NotYaml(_line(node), _TOO_DEEP)
        if isinstance(node, ScalarNode):
            self.lines[path] = _line(node)
            value = self._scalar(node)
        else:
            self.lines.setdefault(path, _line(node))
            self._open.add(id(node))
            value = self._mapping(node, path) if isinstance(node, MappingNode) else self._sequence(node, path)
            self._open.remove(id(node))
        return SearchTag(value) if node.tag == SEARCH else value

    def _scalar(self, node: ScalarNode) -> Any:
        kind = node.tag.removeprefix(_YAML)
        if kind in ("str", "timestamp", "value", SEARCH):
            return node.value
        if kind not in ("null", "bool", "int", "float"):
            raise _unknown_tag(node)
        try:
            return self._scalars.construct_object(node)
        except (ValueError, KeyError):  # such as `!!int x`, or an int of thousands of digits
            raise NotYaml(_line(node), f"has a value that cannot be read as {kind}: {node.value[:60]}") from None

    def _sequence(self, node: Node, path: Path) -> list[Any]:
        if node.tag not in (f"{_YAML}seq", SEARCH):
            raise _unknown_tag(node)
        return [self.build(item, (*path, position)) for position, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        if node.tag not in (f"{_YAML}map", SEARCH):
            raise _unknown_tag(node)
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == f"{_YAML}merge":
                merged = {**self._merged(value, path), **merged}
        for key, value in node.value:
            if key.tag == f"{_YAML}merge":
                continue
            if not isinstance(key, ScalarNode) or key.tag == SEARCH:
                what = f"a {SEARCH} range" if key.tag == SEARCH else "a map or list"
                raise NotYaml(_line(key), f"must have text as keys, got {what}")
            name, place = key.value, (*path, key.value)
            if name in first:
                self.duplicates.append(Problem(place, f"is given twice, first in line {first[name]}"))
            first.setdefault(name, _line(key))
            self.lines[place] = _line(key)
            own[name] = self.build(value, place)
        return {**{name: value for name, value in merged.items() if name not in own}, **own}

    def _merged(self, value: Node, path: Path) -> dict[str, Any]:
        """Return the entries that ``<<`` adds to a map; of several maps the first counts."""
        found: dict[str, Any] = {}
        for part in reversed(value.value) if isinstance(value, SequenceNode) else [value]:
            entries = self.build(part, path)
            if not isinstance(entries, dict):
                raise NotYaml(_line(value), "must name another map by <<")
            found = {**found, **entries}
        return found


def _unknown_tag(node: Node) -> NotYaml:
    tag = node.tag.replace(_YAML, "!!")
    return NotYaml(_line(node), f"must hold plain values and {SEARCH} alone, got the unknown tag {tag}")


def open_document(given: str | os.PathLike[str] | Mapping[str, Any], source: str | None = None) -> Document:
    """Read a schedule's YAML.

    Args:
        given: a file's path; or the text itself, if it has several lines or begins with ``{``; or a mapping.
        source: name used in messages; by default the file's name.

    Raises:
        ScheduleError: the file cannot be read, is not UTF-8, or not YAML.
    """
    if isinstance(given, Mapping):
        return Document(source or TEXT, plain(given))
    if isinstance(given, str) and ("\n" in given or given.lstrip().startswith("{")):
        source, text = source or TEXT, given
    else:
        source = source or str(given)
        text = _text_of(pathlib.Path(given), source)
    try:
        return compose(text, source)
    except NotYaml as error:
        raise ScheduleError([f"{source}{'' if error.line is None else f':{error.line}'}: {error.text}"]) from None


def _text_of(path: pathlib.Path, source: str) -> str:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a zero byte in the name is a ValueError
        raise ScheduleError([f"cannot read schedule {source}: {getattr(error, 'strerror', None) or error}"]) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ScheduleError([f"{source}:{line}: must be UTF-8 text, got byte 0x{content[error.start]:02x}"]) from None


def plain(value: Any) -> Any:
    """Convert mappings to dicts with text keys and sequences to lists, recursively."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
