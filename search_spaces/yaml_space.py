"""A space in a YAML file: ranges, choices and fixed values of ``CAC_*`` variables, other fields and workload options.

    CAC_VAR_MT_THR: {low: 0.9, high: 0.99, step: 0.01, start: 0.95}
    CAC_RULE: {choices: [variance, linear]}
    CAC_RULE_DEPTH: {low: 0.1, high: 1.0, when: {CAC_RULE: linear}}
    CAC_WHOLE_UNITS: 1
    lr: {low: 0.01, high: 1.0, log: true}

A key is asked for in the order of the file; under ``when``, only if the keys above it have one of those values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from search_spaces.own_space import (
    check_choices,
    check_key,
    check_range,
    checked,
    is_option,
    middle,
    settable_fields,
)
from search_spaces.space import Space, SpaceContext, Suggests
from trainables.config import TrialConfig, field_kinds
from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import BY_NAME, is_number

#: Keys of an entry.
KEYS = ("low", "high", "step", "log", "choices", "value", "start", "when", "meaning")
#: Largest accepted file, in bytes.
_MOST_BYTES = 1_000_000
#: Decimals of a value on a grid.
_DECIMALS = 10


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of the file."""

    name: str
    """Variable, field or option of the workload."""
    low: Any = None
    """Least value; None for choices and fixed values."""
    high: Any = None
    """Greatest value, on the grid of `step`."""
    step: Any = None
    """Distance between values; None: all values."""
    log: bool = False
    """True for a logarithmic scale."""
    choices: tuple[Any, ...] | None = None
    """Values to choose from; None for ranges and fixed values."""
    value: Any = None
    """The fixed value; None for ranges and choices."""
    start: Any = None
    """The value that a search begins with."""
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Names of keys above, each with the values under which this key is asked for."""
    meaning: str = ""
    """Its description."""

    @property
    def searched(self) -> bool:
        """Return whether it has several values."""
        return self.value is None

    def holds(self, chosen: Mapping[str, Any]) -> bool:
        """Return whether the key is asked for where others have these values."""
        return all(chosen.get(name) in values for name, values in self.when)

    def ask(self, trial: Suggests) -> Any:
        """Return a suggested value, or the fixed one."""
        if self.choices is not None:
            return trial.suggest_categorical(self.name, self.choices)
        if self.low is None:
            return self.value
        if isinstance(self.low, int):
            return trial.suggest_int(self.name, self.low, self.high, step=self.step or 1, log=self.log)
        value = trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        return value if self.step is None else round(value, _DECIMALS)


@dataclass(frozen=True)
class _Suggest:
    entries: tuple[Entry, ...]

    def __call__(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for entry in self.entries:
            if entry.holds(chosen):
                chosen[entry.name] = entry.ask(trial)
        return {name: _value_of_field(name, value) for name, value in chosen.items()}


@dataclass(frozen=True)
class _Start:
    entries: tuple[Entry, ...]

    def __call__(self, context: SpaceContext) -> Mapping[str, Any]:
        chosen: dict[str, Any] = {}
        for entry in self.entries:
            if entry.holds(chosen):
                chosen[entry.name] = entry.start if entry.searched else entry.value
        return {entry.name: chosen[entry.name] for entry in self.entries if entry.searched and entry.name in chosen}


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
def file_space(file: str, text: str) -> Space:
    """Return the space of a YAML file.

    Args:
        file: its name, for messages.
        text: its contents.

    Raises:
        UserError: it is not YAML, or a key or value is not valid.
    """
    entries: dict[str, Entry] = {}
    for name, given in _read(file, text).items():
        check_key(file, name)
        entries[name] = _entry(file, name, given, entries)
    ordered = tuple(entries.values())
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    return checked(
        Space(
            name=file,
            method="none",
            suggest=_Suggest(ordered),
            start=_Start(ordered),
            start_is_published=False,
            meanings={entry.name: entry.meaning for entry in ordered if entry.meaning},
            description=first.lstrip("# ") if first.startswith("#") else "a file of yours",
        )
    )


def _read(file: str, text: str) -> dict[str, Any]:
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        raise UserError(f"space {file}{line} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(found, dict) or not found:
        raise UserError(
            f"space {file} must be a map of keys such as CAC_VAR_MT_THR: {{low: 0.9, high: 0.99}}, got "
            f"{'nothing' if not found else repr(found)[:60]}"
        )
    names = [key.value for key, _ in node.value]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UserError(f"space {file}: {name} must be there once, line {node.value[place][0].start_mark.line + 1}")
    return found


def _entry(file: str, name: str, given: Any, above: Mapping[str, Entry]) -> Entry:
    """Return the entry of a key after a check of its values."""
    where = f"space {file}: {name}"
    if not isinstance(given, dict):
        return Entry(name=name, value=_checked(file, name, given))
    for key in given:
        if key not in KEYS:
            raise UserError(f"space {file}: {unknown_name(f'key of {name}', str(key), KEYS)}")
    forms = [form for form in (("low", "high"), ("choices",), ("value",)) if any(key in given for key in form)]
    if len(forms) != 1:
        raise UserError(f"{where} takes low and high, or choices, or value, got {', '.join(map(str, given)) or '{}'}")
    for key in ("step", "log") if forms[0] != ("low", "high") else ():
        if key in given:
            raise UserError(f"{where} takes {key} with low and high alone, got {forms[0][0]} and {key}")
    if "meaning" in given and not isinstance(given["meaning"], str):
        raise UserError(f"{where} needs a text for meaning, got {given['meaning']!r}")
    common: dict[str, Any] = {
        "name": name, "when": _conditions(file, name, given.get("when", {}), above),
        "meaning": given.get("meaning", ""),
    }  # fmt: skip
    if "value" in given:
        if "start" in given:
            raise UserError(f"{where} takes start with a range or choices, got value and start")
        return Entry(**common, value=_checked(file, name, given["value"]))
    if "choices" in given:
        return _choice(file, name, given, common)
    return _range(file, name, given, common)


def _choice(file: str, name: str, given: Mapping[str, Any], common: Mapping[str, Any]) -> Entry:
    if not isinstance(given["choices"], list):
        raise UserError(f"space {file}: {name} needs a list of choices, got {given['choices']!r}")
    choices = tuple(_checked(file, name, choice) for choice in given["choices"])
    check_choices(file, name, choices)
    start = _checked(file, name, given["start"]) if "start" in given else choices[0]
    if start not in choices:
        raise UserError(f"space {file}: {name} needs a start among its choices, got {given['start']!r}")
    return Entry(**common, choices=choices, start=start)


def _range(file: str, name: str, given: Mapping[str, Any], common: Mapping[str, Any]) -> Entry:
    where = f"space {file}: {name}"
    for key in ("low", "high"):
        if key not in given:
            raise UserError(f"{where} needs low and high, got no {key}")
    kind = _kind(name)
    if kind not in (None, int, float):
        raise UserError(f"{where} is no number: give choices instead of low and high")
    numbers = {key: _number(given[key]) for key in ("low", "high", "step", "start") if given.get(key) is not None}
    for key, number in numbers.items():
        if not is_number(number):
            raise UserError(f"{where} needs a number for {key}, got {given[key]!r}")
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise UserError(f"{where} needs true or false for log, got {log!r}")
    if kind is float or any(isinstance(numbers[key], float) for key in ("low", "high", "step") if key in numbers):
        numbers = {key: float(number) for key, number in numbers.items()}
    low, high, step = numbers["low"], numbers["high"], numbers.get("step")
    check_range(file, name, low, high, step, log)
    for end in (low, high):
        _checked(file, name, end)
    if kind is int and isinstance(step, float):
        raise UserError(f"{where} needs an integer for step, got {step}")
    if step is not None:
        high = low + math.floor((high - low) / step + 1e-9) * step
        high = round(high, _DECIMALS) if isinstance(high, float) else high
    start = numbers.get("start", middle(low, high, step, log))
    if isinstance(low, int) and isinstance(start, float):
        raise UserError(f"{where} needs an integer for start, got {start}")
    if not low <= start <= high:
        raise UserError(f"{where} needs a start in [{low}, {high}], got {start}")
    return Entry(**common, low=low, high=high, step=step, log=log, start=start)


def _conditions(
    file: str, name: str, given: Any, above: Mapping[str, Entry]
) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    where = f"space {file}: when of {name}"
    if not isinstance(given, dict):
        raise UserError(f"{where} must be a map such as {{CAC_RULE: linear}}, got {given!r}")
    found = []
    for other, wanted in given.items():
        if other not in above:
            raise UserError(f"{where} needs keys above it, got {other!r}: {', '.join(above) or 'there is none'}")
        choices = above[other].choices
        if choices is None:
            raise UserError(f"{where} needs a key with choices, {other} has none")
        values = tuple(_checked(file, other, value) for value in (wanted if isinstance(wanted, list) else [wanted]))
        for value in values:
            if value not in choices:
                raise UserError(f"{where} needs choices of {other} ({', '.join(map(str, choices))}), got {value!r}")
        found.append((other, values))
    return tuple(found)


def _kind(name: str) -> type | None:
    """Return the type of what a key stands for; None for an option of the workload."""
    variable = BY_NAME.get(name)
    return variable.kind if variable is not None else None if is_option(name) else field_kinds()[name]


def _checked(file: str, name: str, value: Any) -> Any:
    """Return a value as Optuna stores it, a list as text, after a check against what the name stands for."""
    if isinstance(value, list):
        if any(isinstance(part, (list, dict)) for part in value):
            raise UserError(
                f"space {file}: {name} must be one value, got {value!r}: give several as {{choices: [...]}}"
            )
        value = ",".join(map(str, value))
    kind = _kind(name)
    if kind is float or (kind is None and isinstance(value, str)):
        value = _number(value)
    if kind is bool and value in (0, 1):
        value = bool(value)
    if kind is tuple and isinstance(value, int):
        value = str(value)
    if not isinstance(value, (bool, int, float, str)):
        raise UserError(f"space {file}: {name} must be a number or a text, got {value!r}")
    try:
        if (variable := BY_NAME.get(name)) is not None:
            variable.check(_value_of_field(name, value))
        elif name in settable_fields():
            TrialConfig(**{name: _value_of_field(name, value)})
    except UserError as error:
        raise UserError(f"space {file}: {error}") from None
    return value


def _value_of_field(name: str, value: Any) -> Any:
    """Return a stored value as a field's: lists are stored as comma lists."""
    variable = BY_NAME.get(name)
    if variable is not None:
        return variable.read(value) if variable.kind is tuple else value
    if not is_option(name) and field_kinds()[name] is tuple:
        return tuple(part.strip() for part in value.split(","))
    return value


def _number(value: Any) -> Any:
    """Return a number for text such as ``1e-3``, which YAML 1.1 reads as text; other values as they are."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
