"""Names in a schedule: exact, glob, or ``re:`` regular expression; each must match. Pure, without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from trainables.errors import UserError, unknown_name

T = TypeVar("T")
#: Beginning of a regular expression, and the signs of a glob.
REGEX, GLOB = "re:", "*?["


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without the prefix that `DataParallel` adds.

    >>> plain_name("module.layer1.0.conv1.weight")
    'layer1.0.conv1.weight'
    """
    return name.removeprefix("module.")


def without_parallel(name: str) -> str:
    """Return a name as in published schedules, without the ``module.`` of parallel wrappers.

    >>> without_parallel("features.module.0.weight")
    'features.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "module")


def match_names(pattern: str, known: Sequence[str], what: str = "parameter") -> tuple[str, ...]:
    """Return the known names that a pattern matches, in their order; UserError if there is none.

    An exact name matches only itself. A pattern with ``*``, ``?`` or ``[`` is a glob in which ``*`` also matches dots;
    ``re:`` begins a regular expression that must match the whole name. ``module.`` of a parallel wrapper is ignored on
    both sides. Messages call the names by ``what``.
    """
    if pattern in known:
        return (pattern,)
    if pattern.startswith(REGEX):
        try:
            expression = re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise UserError(f"{pattern!r} is no regular expression: {error}") from None
        matches = tuple(name for name in known if expression.fullmatch(plain_name(name)))
    elif any(sign in pattern for sign in GLOB):
        matches = tuple(name for name in known if fnmatchcase(plain_name(name), plain_name(pattern)))
    else:
        wanted = without_parallel(pattern)
        # Few names contain "module": all others are compared directly.
        matches = tuple(n for n in known if (n == wanted or "module" in n) and without_parallel(n) == wanted)
        if not matches:
            raise unknown_name(what, pattern, known)
    if not matches:
        raise UserError(f"{pattern!r} matches no {what}; there are {', '.join(known)}")
    return matches


def patterns_of(
    patterns: Iterable[str],
    known: Sequence[str],
    on_error: Callable[[str, UserError], None] | None = None,
    match: Callable[[str, Sequence[str]], tuple[str, ...]] = match_names,
) -> dict[str, str]:
    """Return the pattern of each known name that has one: its exact name, else the first that ``match`` finds.

    Names are in the order of their patterns. ``on_error`` is called with a pattern that matches nothing, and its error,
    instead of raising it.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        try:
            matches = match(pattern, known)
        except UserError as error:
            if on_error is None:
                raise
            on_error(pattern, error)
            continue
        for name in matches:
            if name not in found or (_is_exact(pattern) and not _is_exact(found[name])):
                found[name] = pattern
    return found


def _is_exact(pattern: str) -> bool:
    return not pattern.startswith(REGEX) and not any(sign in pattern for sign in GLOB)


def assigned(values: Mapping[str, T], known: Sequence[str]) -> dict[str, T]:
    """Return the values, given by pattern, of the known names that have one, in their order (`patterns_of`)."""
    found = patterns_of(values, known)
    return {name: values[found[name]] for name in known if name in found}


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: its module's name up to the first number that is not the last part.

    >>> block_of("layer1.0.conv1.weight"), block_of("conv3.weight"), block_of("features.6.weight")
    ('layer1.0', 'conv3', 'features.6')
    """
    parts = plain_name(name).split(".")[:-1]
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts)
