"""Declaration of a ``CAC_*`` variable as a field of a dataclass, and what follows from it: checks, parsing, texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from trainables.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values that a variable may have."""

    words: str
    """The range as errors print it after "must be"."""
    holds: Callable[[Any], bool]
    """Returns whether a value of the right type is in range."""


def at_least(low: int, note: str = "") -> Range:
    """Return the range of integers from ``low`` on; a note is appended to its words."""
    return Range(words=f"an integer >= {low}{note}", holds=lambda value: value >= low)


def within(interval: str, also: dict[float, str] | None = None) -> Range:
    """Return the range of an interval such as ``(0, 1]``, and single values beside it with their meaning."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    others = also or {}
    words = " or ".join([f"in {interval}", *(f"{value:g} ({meaning})" for value, meaning in others.items())])

    def holds(value: float) -> bool:
        above = value > low or (interval[0] == "[" and value == low)
        below = value < high or (interval[-1] == "]" and value == high)
        return (above and below) or value in others

    return Range(words=words, holds=holds)


def variable(
    name: str,
    default: Any,
    allowed: Range,
    meaning: str,
    *,
    mode: str,
    published: bool = True,
    default_text: str | None = None,
) -> Any:
    """Declare a variable as a field of a dataclass.

    Args:
        name: the environment variable.
        default: its default; None where it is not set.
        allowed: its range.
        meaning: description for users.
        mode: manual, auto (the rule ``variance``), both (any rule), or the names of the rules that read it.
        published: whether the published library has it; other variables are ours, with defaults that keep its
            behaviour.
        default_text: the default in words, where the value does not say it.
    """
    text = default_text or ("not set" if default is None else as_text(default))
    return field(
        default=default,
        metadata={
            "name": name, "allowed": allowed, "meaning": meaning, "mode": mode, "published": published,
            "default_text": text,
        },
    )  # fmt: skip


def as_text(value: Any) -> str:
    """Return a value as the text of an environment variable."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One declared ``CAC_*`` variable."""

    name: str
    """The environment variable."""
    field: str
    """The field of `Settings` that holds it."""
    kind: type
    """Type of a value: int, float, bool, str or tuple."""
    element: type | None
    """Type of a tuple's elements."""
    optional: bool
    """True if it may be None."""
    default: Any
    """Its default."""
    rule: str
    """The range in words, as errors print it after "must be"."""
    holds: Callable[[Any], bool]
    """Returns whether a value of the right type is in range."""
    default_text: str
    """The default as text."""
    mode: str
    """The modes that read it; see `variable`."""
    meaning: str
    """Description for users."""
    published: bool
    """True if the published library has it."""

    def has_type(self, value: Any) -> bool:
        """Return whether a value is of the right type; an integer is a number, but a bool is neither."""
        if self.kind is tuple:
            return isinstance(value, tuple) and all(_is(self.element, item) for item in value)
        return _is(self.kind, value)

    def check(self, value: Any) -> None:
        """Raise UserError if ``value`` is not valid for this variable."""
        if not self.has_type(value) or not self.holds(value):
            raise UserError(f"{self.name} must be {self.rule}, got {shown(value)}")

    def read(self, text: str) -> Any:
        """Parse the text of an environment variable or of ``--set``; raise UserError if it is not valid."""
        try:
            value = self._parse(text)
        except ValueError:
            raise UserError(f"{self.name} must be {self.rule}, got {shown(text)}") from None
        self.check(value)
        return value

    def _parse(self, text: str) -> Any:
        if self.kind is bool:
            return _parse_flag(text)
        if self.kind is not tuple:
            return self.kind(text.strip())
        return parse_names(text) if self.element is str else _parse_integers(text)


def _parse_flag(text: str) -> bool:
    folded = text.strip().casefold()
    if folded in ("1", "true", "yes", "on"):
        return True
    if folded in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; an integer is one, a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is(wanted: type | None, value: Any) -> bool:
    if wanted is float:
        return is_number(value)
    return isinstance(value, wanted or object) and (wanted is bool or not isinstance(value, bool))


def shown(value: Any) -> str:
    """Return a value as error messages show it."""
    return repr(",".join(map(str, value))) if isinstance(value, (tuple, list)) else repr(value)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma list without surrounding spaces."""
    return tuple(part.strip() for part in text.split(","))


def _parse_integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip().strip("[]()").rstrip(",").split(","))


def declared_variables(declaring: type) -> tuple[Variable, ...]:
    """Return the variables that a dataclass declares with `variable`, in order."""
    hints = get_type_hints(declaring)
    found = []
    for declared in fields(declaring):
        hint, given = hints[declared.name], dict(declared.metadata)
        optional = isinstance(hint, UnionType)
        plain = get_args(hint)[0] if optional else hint
        allowed: Range = given.pop("allowed")
        found.append(
            Variable(
                field=declared.name,
                kind=get_origin(plain) or plain,
                element=get_args(plain)[0] if get_args(plain) else None,
                optional=optional,
                default=declared.default,
                rule=allowed.words,
                holds=allowed.holds,
                **given,
            )
        )
    return tuple(found)
