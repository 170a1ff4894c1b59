"""Spaces in YAML files, ours and the user's: a map of variables, fields and options of the workload to their values.

    # Rule and learning rate: the first line is the description, further ones are notes
    CAC_RULE: {choices: [variance, linear]}
    CAC_RULE_END_ITR: {low: 0.5 steps, high: 1 steps, step: 0.1 steps, when: {CAC_RULE: linear}}
    lr: {low: 0.01, high: 1.0, log: true}

A key is asked for in the order of the file; under ``when``, only if the keys above it have one of those values. Where
one variable has other ranges in other branches, each has the branch before a dot: ``linear.lr``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml

from search_spaces.own_space import (
    check_choices,
    check_key,
    check_range,
    checked,
    is_option,
    middle,
)
from search_spaces.space import ANY_RUN, Range, Space, SpaceContext, Suggests
from trainables.compression.schedule.parts import KINDS
from trainables.config import field_kinds
from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import BY_NAME, is_number

#: Keys of an entry.
KEYS = ("low", "high", "step", "log", "at_most", "choices", "value", "start", "when", "meaning")
#: Lengths of a run of which numbers may be shares: ``0.9 steps``.
LENGTHS = ("steps", "epochs")
_SHARE = re.compile(rf"(\d+\.?\d*|\.\d+)\s+({'|'.join(LENGTHS)})")
#: Largest accepted file, in bytes.
_MOST_BYTES = 1_000_000
#: Decimals of a value on a grid.
_DECIMALS = 10


def _length(unit: str, context: SpaceContext) -> int:
    return context.total_steps if unit == "steps" else context.epochs


@dataclass(frozen=True)
class _Share:
    """A number of steps or epochs that is a share of the run's."""

    share: float
    unit: str

    def of(self, context: SpaceContext) -> int:
        return int(self.share * _length(self.unit, context))


def _on(value: Any, context: SpaceContext) -> Any:
    return value.of(context) if isinstance(value, _Share) else value


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of the file."""

    name: str
    """Variable, field or option of the workload, with its branch."""
    asked: Range | None = None
    """Its values, whose ends and step may be shares of the run; None for a fixed one."""
    at_most: str | None = None
    """Length of the run at which the range is cut."""
    value: Any = None
    """The fixed value."""
    start: Any = None
    """The value that a search begins with; None: the middle of the range."""
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Names of keys above, each with the values under which this key is asked for."""
    meaning: str = ""
    """Its description."""

    @property
    def field(self) -> str:
        """Return the variable, field or option."""
        return self.name.rpartition(".")[2]

    def holds(self, chosen: Mapping[str, Any]) -> bool:
        """Return whether the key is asked for where others have these values."""
        return all(chosen.get(name) in values for name, values in self.when)

    def range(self, context: SpaceContext) -> Range:
        """Return what is asked for on a run."""
        asked = self.asked
        assert asked is not None
        if asked.choices is not None:
            return asked
        low, high, step = (_on(value, context) for value in (asked.low, asked.high, asked.step))
        if self.at_most is not None:
            low, high = (min(end, _length(self.at_most, context)) for end in (low, high))
        if asked.log and isinstance(asked.low, _Share):
            low = max(1, low)
        high = max(low, high)  # on a short run
        if step is not None:
            step = max(1, step) if isinstance(asked.step, _Share) else step
            high = low + math.floor((high - low) / step + 1e-9) * step
            high = round(high, _DECIMALS) if isinstance(high, float) else high
        return replace(asked, low=low, high=high, step=step, integer=isinstance(low, int))

    def begin(self, context: SpaceContext) -> Any:
        """Return the value that a search begins with on a run."""
        if self.asked is None:
            return self.value
        asked = self.range(context)
        if asked.choices is not None:
            return self.start
        if self.start is None:
            return middle(asked.low, asked.high, asked.step, asked.log)
        return max(asked.low, min(_on(self.start, context), asked.high))

    def ask(self, trial: Suggests, context: SpaceContext) -> Any:
        """Return a suggested value, or the fixed one."""
        if self.asked is None:
            return self.value
        value = self.range(context).ask(trial)
        return round(value, _DECIMALS) if self.asked.step is not None and isinstance(value, float) else value


@dataclass(frozen=True)
class _Entries:
    """The functions of a file's space; methods of an object, not closures, so that it can be sent between processes."""

    entries: tuple[Entry, ...]
    lines: tuple[str, ...]

    def _values(self, value_of: Callable[[Entry], Any]) -> list[tuple[Entry, Any]]:
        """Return the entries whose conditions hold, and their values."""
        chosen: dict[str, Any] = {}
        for entry in self.entries:
            if entry.holds(chosen):
                chosen[entry.name] = value_of(entry)
        return [(entry, chosen[entry.name]) for entry in self.entries if entry.name in chosen]

    def suggest(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        values = self._values(lambda entry: entry.ask(trial, context))
        return {entry.field: _value_of_field(entry.field, value) for entry, value in values}

    def start(self, context: SpaceContext) -> dict[str, Any]:
        values = self._values(lambda entry: entry.begin(context))
        return {entry.name: value for entry, value in values if entry.asked is not None}

    def notes(self, context: SpaceContext) -> Sequence[str]:
        return self.lines


def text_of(file: str) -> str:
    """Return the text of a space's file; UserError if it cannot be read."""
    try:
        if Path(file).stat().st_size > _MOST_BYTES:
            raise UserError(f"space {file} must not be larger than {_MOST_BYTES // 10**6} MB")
        return Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read space {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"space {file} must be UTF-8 text") from None


@cache
def file_space(name: str, text: str) -> Space:
    """Return the space of a YAML file, given its name and its contents.

    Raises:
        UserError: it is not YAML, or a key or value is not valid.
    """
    entries = _Reader(name).entries(text)
    lines = takewhile(lambda line: line.startswith("#"), text.strip().splitlines())
    description, *notes = [line.lstrip("# ") for line in lines] or ["a file of yours"]
    functions = _Entries(entries, tuple(notes))
    return checked(
        Space(
            name=name,
            method="none",
            suggest=functions.suggest,
            start=functions.start,
            start_is_published=False,
            meanings={entry.field: entry.meaning for entry in entries if entry.meaning},
            notes=functions.notes,
            description=description,
        )
    )


class _Reader:
    """Read the entries of a file; stop at the first error."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._above: dict[str, Entry] = {}

    def entries(self, text: str) -> tuple[Entry, ...]:
        try:
            node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = "" if mark is None else f":{mark.line + 1}"
            said = getattr(error, "problem", None) or error
            raise UserError(f"space {self._file}{line} is not YAML: {said}") from None
        if not isinstance(found, dict) or not found:
            raise UserError(
                f"space {self._file} must be a map of keys such as CAC_VAR_MT_THR: {{low: 0.9, high: 0.99}}, got "
                f"{repr(found)[:60] if found else 'nothing'}"
            )
        if found.keys() & {"policies", *KINDS.values()}:
            raise UserError(
                f"{self._file} is a compression schedule, no space: schedule check {self._file} shows it, "
                f"search --schedule {self._file} searches the values that it marks"
            )
        names = set()
        for key, _ in node.value:
            if key.value in names:
                self._refuse(key.value, f"must be there once, line {key.start_mark.line + 1}")
            names.add(key.value)
        for name, given in found.items():
            check_key(self._file, name)
            self._above[name] = self._entry(name, given)
        return tuple(self._above.values())

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise UserError(f"space {self._file}: {name} {rule}")

    def _entry(self, name: str, given: Any) -> Entry:
        if not isinstance(given, dict):
            return Entry(name=name, value=self._checked(name, given))
        for key in given:
            if key not in KEYS:
                raise UserError(f"space {self._file}: {unknown_name(f'key of {name}', str(key), KEYS)}")
        forms = [form for form in ("low", "choices", "value") if form in given or (form == "low" and "high" in given)]
        if len(forms) != 1:
            got = ", ".join(map(str, given)) or "{}"
            self._refuse(name, f"takes low and high, or choices, or value, got {got}")
        for key in ("step", "log", "at_most") if forms != ["low"] else ():
            if key in given:
                self._refuse(name, f"takes {key} with low and high alone, got {forms[0]} and {key}")
        if not isinstance(given.get("meaning", ""), str):
            self._refuse(name, f"needs a text for meaning, got {given['meaning']!r}")
        common: dict[str, Any] = {
            "name": name, "when": self._conditions(name, given.get("when", {})), "meaning": given.get("meaning", ""),
        }  # fmt: skip
        if forms == ["low"]:
            return self._range(name, given, common)
        if forms == ["choices"]:
            return self._choice(name, given, common)
        if "start" in given:
            self._refuse(name, "takes start with a range or choices, got value and start")
        return Entry(**common, value=self._checked(name, given["value"]))

    def _choice(self, name: str, given: Mapping[str, Any], common: Mapping[str, Any]) -> Entry:
        if not isinstance(given["choices"], list):
            self._refuse(name, f"needs a list of choices, got {given['choices']!r}")
        choices = tuple(self._checked(name, choice) for choice in given["choices"])
        check_choices(self._file, name, choices)
        start = self._checked(name, given["start"]) if "start" in given else choices[0]
        if start not in choices:
            self._refuse(name, f"needs a start among its choices, got {given['start']!r}")
        return Entry(**common, asked=Range(name=name, choices=choices), start=start)

    def _range(self, name: str, given: Mapping[str, Any], common: Mapping[str, Any]) -> Entry:
        for key in ("low", "high"):
            if key not in given:
                self._refuse(name, f"needs low and high, got no {key}")
        kind = _kind(name)
        if kind not in (None, int, float):
            self._refuse(name, "is no number: give choices instead of low and high")
        numbers = {key: _bound(given[key]) for key in ("low", "high", "step", "start") if given.get(key) is not None}
        for key, number in numbers.items():
            if not is_number(number) and not isinstance(number, _Share):
                self._refuse(name, f"needs a number for {key}, got {given[key]!r}")
        log, at_most = given.get("log", False), given.get("at_most")
        if not isinstance(log, bool):
            self._refuse(name, f"needs true or false for log, got {log!r}")
        if at_most not in (None, *LENGTHS):
            self._refuse(name, f"needs {' or '.join(LENGTHS)} for at_most, got {at_most!r}")
        if kind is float or any(isinstance(numbers.get(key), float) for key in ("low", "high", "step")):
            numbers = {key: n if isinstance(n, _Share) else float(n) for key, n in numbers.items()}
        start = numbers.pop("start", None)
        entry = Entry(**common, asked=Range(name=name, log=log, **numbers), at_most=at_most, start=start)
        ends = {key: _on(number, ANY_RUN) for key, number in numbers.items()}
        check_range(self._file, name, ends["low"], ends["high"], ends.get("step"), log)
        asked = entry.range(ANY_RUN)
        start = entry.begin(ANY_RUN) if entry.start is None else _on(entry.start, ANY_RUN)
        if asked.integer and isinstance(start, float):
            self._refuse(name, f"needs an integer for start, got {start}")
        if not asked.low <= start <= asked.high:
            self._refuse(name, f"needs a start in [{asked.low}, {asked.high}], got {start}")
        return entry

    def _conditions(self, name: str, given: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        where = f"when of {name}"
        if not isinstance(given, dict):
            self._refuse(where, f"must be a map such as {{CAC_RULE: linear}}, got {given!r}")
        found = []
        for other, wanted in given.items():
            if other not in self._above:
                self._refuse(where, f"needs keys above it, got {other!r}: {', '.join(self._above) or 'there is none'}")
            asked = self._above[other].asked
            choices = None if asked is None else asked.choices
            if choices is None:
                self._refuse(where, f"needs a key with choices, {other} has none")
            values = tuple(self._checked(other, value) for value in (wanted if isinstance(wanted, list) else [wanted]))
            for value in values:
                if value not in choices:
                    self._refuse(where, f"needs choices of {other} ({', '.join(map(str, choices))}), got {value!r}")
            found.append((other, values))
        return tuple(found)

    def _checked(self, name: str, value: Any) -> Any:
        """Return a value as Optuna stores it, a list as text; `own_space.checked` tries it as its field."""
        if isinstance(value, list):
            if any(isinstance(part, (list, dict)) for part in value):
                self._refuse(name, f"must be one value, got {value!r}: give several as {{choices: [...]}}")
            value = ",".join(map(str, value))
        kind = _kind(name)
        if kind is float or (kind is None and isinstance(value, str)):
            value = _number(value)
        if kind is bool and value in (0, 1):
            value = bool(value)
        if kind is tuple and isinstance(value, int):
            value = str(value)
        if not isinstance(value, (bool, int, float, str)):
            self._refuse(name, f"must be a number or a text, got {value!r}")
        return value


def _kind(name: str) -> type | None:
    """Return the type of what a key stands for; None for an option of the workload."""
    field = name.rpartition(".")[2]
    if field in BY_NAME:
        return BY_NAME[field].kind
    return None if is_option(field) else field_kinds()[field]


def _value_of_field(field: str, value: Any) -> Any:
    """Return a stored value as a field's: lists are stored as comma lists."""
    if _kind(field) is not tuple:
        return value
    variable = BY_NAME.get(field)
    return tuple(part.strip() for part in value.split(",")) if variable is None else variable.read(value)


def _number(value: Any) -> Any:
    """Return a number for text such as ``1e-3``, which YAML 1.1 reads as text; other values as they are."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _bound(value: Any) -> Any:
    """Return a share of the run, or a number."""
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    return _number(value) if share is None else _Share(float(share[1]), share[2])
