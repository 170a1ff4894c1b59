"""Ranges to search in a schedule: ``!search {low: 0.1, high: 0.9}`` in place of a value. Does not import torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainables.compression.schedule.document import open_document
from trainables.compression.schedule.parts import Schedule
from trainables.compression.schedule.positions import Document, SearchTag, search_tags
from trainables.compression.schedule.problems import Findings, Path, dotted, nearest, shown
from trainables.compression.schedule.reading import CheckLR, examine
from trainables.errors import UserError, unknown_name
from trainables.gradskip.variable_types import is_number

Value = float | int | str
KEYS = ("low", "high", "step", "log", "choices", "name")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The values allowed in one place: numbers between two ends, or one of several choices."""

    low: float | int | None = None
    """Least value; None with choices."""
    high: float | int | None = None
    """Greatest value, above ``low``; None with choices."""
    step: float | int | None = None
    """Distance between values, counted from ``low``; None: all values between the ends."""
    log: bool = False
    """True if the scale is logarithmic; ``low`` must then be above 0."""
    choices: tuple[Value, ...] | None = None
    """At least two plain values."""

    @property
    def integer(self) -> bool:
        """Return whether values are integers: both ends are, and the step, if there is one."""
        return all(isinstance(end, int) for end in (self.low, self.high, 1 if self.step is None else self.step))

    def middle(self) -> Value:
        """Return the middle of the range (geometric with ``log``, on the grid of ``step``), or the first choice."""
        if self.choices is not None:
            return self.choices[0]
        assert self.low is not None
        assert self.high is not None
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        if self.step is not None:
            middle = self.low + math.floor((middle - self.low) / self.step) * self.step
        return math.floor(middle) if self.integer else middle

    def checked(self, value: Any, name: str) -> Value:
        """Return the value converted to the type of this mark.

        Raises:
            UserError: it is none of the choices, not a number, or not an integer if only integers are allowed.
        """
        if self.choices is not None:
            if value not in self.choices:
                raise UserError(f"{name} must be one of {', '.join(map(str, self.choices))}, got {shown(value)}")
            return self.choices[self.choices.index(value)]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{name} must be a number, got {shown(value)}")
        if not self.integer:
            return float(value)
        if value != int(value):
            raise UserError(f"{name} must be a whole number, got {value}")
        return int(value)


@dataclass(frozen=True)
class MarkedSchedule:
    """A schedule that contains ranges to search."""

    document: Document
    """The document with a `SearchTag` in place of each range."""
    marks: Mapping[str, Mark]
    """By name, in the order of the file: ``name`` if given, else the dotted path."""
    names: Mapping[Path, str] = field(repr=False)
    """Name of the mark at each path."""

    def fill(self, values: Mapping[str, Value]) -> dict[str, Any]:
        """Return the schedule's plain mapping with values in place of the ranges.

        Args:
            values: by name, one for each mark.

        Raises:
            UserError: a name is unknown, a mark has no value, or a value has the wrong type.
        """
        for name in values:
            if name not in self.marks:
                raise unknown_name("search range", name, self.marks)
        for name in self.marks:
            if name not in values:
                raise UserError(f"{name} needs a value: it is a range to search")
        right = {name: mark.checked(values[name], name) for name, mark in self.marks.items()}
        filled: dict[str, Any] = _filled(self.document.value, (), lambda path: right[self.names[path]])
        return filled

    def read(
        self, values: Mapping[str, Value], *, compatible: bool = False, check_lr: CheckLR | None = None
    ) -> Schedule:
        """Read the filled schedule as `read_schedule` does, with the file's lines in messages.

        Raises:
            UserError: as `fill` and `read_schedule`.
        """
        schedule, findings = examine(self.filled(values), compatible=compatible, check_lr=check_lr)
        findings.settle()
        return schedule

    def filled(self, values: Mapping[str, Value]) -> Document:
        """Return the document with values in place of the ranges."""
        return replace(self.document, value=self.fill(values))

    def middles(self) -> dict[str, Value]:
        """Return the middle of each range, or the first choice, by name."""
        return {name: mark.middle() for name, mark in self.marks.items()}


def read_marks(given: str | os.PathLike[str], *, source: str | None = None) -> MarkedSchedule:
    """Read the ranges in a schedule's file or text; there may be none.

    Args:
        given: as in `read_schedule`.
        source: as in `read_schedule`.

    Raises:
        ScheduleError: it is not YAML or not a map, or ranges are invalid; with all errors.
    """
    document = open_document(given, source)
    findings = Findings(document.source, document.lines)
    marks: dict[str, Mark] = {}
    first: dict[str, Path] = {}
    names: dict[Path, str] = {}
    if not isinstance(document.value, dict):
        findings.error((), f"a schedule must be a map with version and policies, got {shown(document.value)}")
    for path, tag in search_tags(document.value):
        read = _read_mark(tag.definition, path, findings)
        if read is None:
            continue
        mark, name = read
        names[path] = name
        if marks.setdefault(name, mark) != mark:
            findings.error(
                path, f"shares the name {name!r} with {dotted(first[name])}, so low, high, ... must be the same there"
            )
        first.setdefault(name, path)
    findings.settle()
    return MarkedSchedule(document, marks, names)


def _filled(value: Any, path: Path, value_at: Callable[[Path], Value]) -> Any:
    if isinstance(value, SearchTag):
        return value_at(path)
    if isinstance(value, dict):
        return {key: _filled(item, (*path, key), value_at) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, (*path, position), value_at) for position, item in enumerate(value)]
    return value


def _read_mark(given: Any, path: Path, findings: Findings) -> tuple[Mark, str] | None:
    """Return a mark and its name; None if there is a problem."""
    before = len(findings.errors)
    if not isinstance(given, dict):
        findings.error(path, f"!search must be a map such as {{low: 0.1, high: 0.9}}, got {shown(given)}")
        return None
    for key in given:
        if key not in KEYS:
            findings.error((*path, key), f"unknown key of !search{nearest(key, KEYS)}")
    name = given.get("name", dotted(path))
    if not isinstance(name, str) or not name:
        findings.error((*path, "name"), f"must be text, got {shown(name)}")
    rule = _broken_rule(given)
    if rule is not None:
        findings.error(path, f"!search {rule}")
    if len(findings.errors) > before:
        return None
    if "choices" in given:
        return Mark(choices=tuple(given["choices"])), name
    return Mark(low=given["low"], high=given["high"], step=given.get("step"), log=given.get("log", False)), name


def _broken_rule(given: Mapping[str, Any]) -> str | None:
    """Return the rule that a definition breaks, or None."""
    if "choices" in given:
        beside = [key for key in KEYS[:4] if key in given]
        if beside:
            return f"takes choices or low and high, got choices and {beside[0]}"
        choices = given["choices"]
        if not isinstance(choices, list) or not all(isinstance(c, (int, float, str)) for c in choices):
            return f"needs choices that are a list of plain values, got {shown(choices)}"
        return None if len(set(choices)) > 1 else f"needs at least two different choices, got {shown(choices)}"
    for key in ("low", "high"):
        if key not in given:
            return "needs low and high, or choices"
    for key in ("low", "high", "step"):
        if given.get(key) is not None and not is_number(given[key]):
            return f"needs a number for {key}, got {shown(given[key])}"
    low, high, step, log = given["low"], given["high"], given.get("step"), given.get("log", False)
    if low is None or high is None or low >= high:
        return f"needs low < high, got low {low} and high {high}"
    if not isinstance(log, bool):
        return f"needs true or false for log, got {shown(log)}"
    if log and low <= 0:
        return f"needs low > 0 with log, got {low}"
    if log and step is not None:
        return "takes log or step, got both"
    if step is not None and not 0 < step <= high - low:
        return f"needs a step in (0, high - low], got {step}"
    return None
