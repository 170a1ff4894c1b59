"""Names in a schedule: exact, glob, or ``re:`` regular expression; each has to match. Pure, without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from trainables.errors import UserError, unknown_name

T = TypeVar("T")
REGEX = "re:"


def plain_name(name: str) -> str:
    """A parameter's or module's name without what `DataParallel` puts before it.

    >>> plain_name("module.layer1.0.conv1.weight")
    'layer1.0.conv1.weight'
    """
    return name.removeprefix("module.")


def without_parallel(name: str) -> str:
    """A name as published schedules write it, every wrapper's ``module.`` left out.

    >>> without_parallel("features.module.0.weight")
    'features.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "module")


def match_names(pattern: str, known: Sequence[str], what: str = "parameter") -> tuple[str, ...]:
    """The known names that a pattern means, in their order; at least one.

    An exact name comes first: then nothing else is meant. A pattern with ``*``, ``?`` or ``[`` is a glob in which
    ``*`` also matches dots; ``re:`` begins a regular expression that must match the whole name. ``module.`` of a
    parallel wrapper is ignored on both sides.

    Args:
        pattern: exact name, glob, or ``re:`` and a regular expression.
        known: names of the model.
        what: what is named, for messages.

    Raises:
        UserError: nothing matches, or the expression cannot be read.
    """
    if pattern in known:
        return (pattern,)
    if pattern.startswith(REGEX):
        try:
            expression = re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise UserError(f"{pattern!r} is no regular expression: {error}") from None
        matches = tuple(name for name in known if expression.fullmatch(plain_name(name)))
    elif any(sign in pattern for sign in "*?["):
        matches = tuple(name for name in known if fnmatchcase(plain_name(name), plain_name(pattern)))
    else:
        wanted = without_parallel(pattern)
        # Few names have such a part: the others are compared as they are.
        matches = tuple(n for n in known if (n == wanted or "module" in n) and without_parallel(n) == wanted)
        if not matches:
            raise unknown_name(what, pattern, known)
    if not matches:
        raise UserError(f"{pattern!r} matches no {what}; there are {', '.join(known)}")
    return matches


def assigned(
    values: Mapping[str, T],
    known: Sequence[str],
    what: str = "parameter",
    on_error: Callable[[str, UserError], None] | None = None,
) -> dict[str, T]:
    """Each known name's value, where patterns have values: an exact name wins over a pattern, then the first pattern.

    Args:
        values: by pattern.
        known: names of the model.
        what: what is named, for messages.
        on_error: called with the pattern and its error instead of raising it.

    Returns:
        In the order of ``known``; only names with a value.

    Raises:
        UserError: a pattern matches nothing.
    """
    found: dict[str, tuple[bool, T]] = {}
    for pattern, value in values.items():
        try:
            matches = match_names(pattern, known, what)
        except UserError as error:
            if on_error is None:
                raise
            on_error(pattern, error)
            continue
        exact = not pattern.startswith(REGEX) and not any(sign in pattern for sign in "*?[")
        for name in matches:
            if name not in found or (exact and not found[name][0]):
                found[name] = (exact, value)
    return {name: found[name][1] for name in known if name in found}


def listed(patterns: Iterable[str], known: Sequence[str], what: str = "parameter") -> tuple[str, ...]:
    """The names that any of the patterns means, in the patterns' order, each once.

    Raises:
        UserError: a pattern matches nothing.
    """
    return tuple(dict.fromkeys(name for pattern in patterns for name in match_names(pattern, known, what)))


def block_of(name: str) -> str:
    """The block that a parameter belongs to: its module up to the first number with something behind it.

    >>> block_of("layer1.0.conv1.weight"), block_of("conv3.weight"), block_of("features.6.weight")
    ('layer1.0', 'conv3', 'features.6')
    """
    parts = plain_name(name).split(".")[:-1]
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts)
