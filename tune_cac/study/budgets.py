"""Budgets of a search as users write them: a duration, a number of bytes, and a number of full trainings."""

from __future__ import annotations

import re

from trainables.errors import UserError
from trainables.gradskip.variables import is_number

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_DURATION = re.compile(r"\s*".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?)\s*{unit})?" for unit in _SECONDS))


def read_duration(value: float | str, flag: str = "--time-budget") -> float:
    """Return a number of seconds from a number, or from text with units.

    >>> read_duration("1h30m"), read_duration("90m"), read_duration("3600")
    (5400.0, 5400.0, 3600.0)

    Raises:
        UserError: no duration, or not a positive one.
    """
    text = str(value).strip().lower()
    found = _DURATION.fullmatch(text)
    if is_number(value) or re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(value)
    else:
        seconds = 0.0 if found is None else sum(_SECONDS[u] * float(n) for u, n in found.groupdict().items() if n)
    if not seconds > 0:
        raise UserError(
            f"{flag} must be a positive number of seconds, or a duration such as 90m or 1h30m, got {value!r}"
        )
    return seconds


def read_bytes(value: int | str) -> int:
    """Return a number of bytes from a number, or from text with a unit.

    >>> read_bytes("1.5MB")
    1500000

    Raises:
        UserError: no such number, or a negative one.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or found is None or found[2].upper() not in _UNITS:
        raise UserError(
            f"--checkpoint-budget must be a number of bytes >= 0 with or without a unit, such as 20GB, got {value!r}"
        )
    return round(float(found[1]) * _UNITS[found[2].upper()])


def check_cost_budget(value: float | None) -> None:
    """Raise UserError unless a cost budget is a positive number, or none."""
    if value is not None and not (is_number(value) and value > 0):
        raise UserError(f"--cost-budget must be a positive number of full trainings, such as 12.5, got {value!r}")
