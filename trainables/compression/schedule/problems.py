"""Problems of a schedule, collected with their lines and reported in one line each. Does not import torch."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainables.errors import UserError

#: Keys and list positions from the schedule's root to a value.
Path = tuple[str | int, ...]


class ScheduleError(UserError):
    """A schedule that cannot be used. The message has the first problem and the number of the others."""

    def __init__(self, errors: Sequence[str]) -> None:
        """Create the error.

        Args:
            errors: one line each, at least one, in the order of the file.
        """
        self.errors = tuple(errors)
        more = f" (and {len(errors) - 1} more: `schedule check` lists them)" if len(errors) > 1 else ""
        super().__init__(errors[0] + more)

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)  # the message is built again when unpickled


@dataclass(frozen=True)
class Problem:
    """One problem of a schedule."""

    path: Path
    """The entry with the problem."""
    text: str
    """The rule, the given value, and how to correct it."""
    line: int | None = None
    """Line number from 1; None: the line of the path."""


def dotted(path: Path) -> str:
    """Return a path in the form used in messages and names of search ranges.

    >>> dotted(("policies", 0, "pruner"))
    'policies.0.pruner'
    """
    return ".".join(map(str, path))


def line_at(lines: Mapping[Path, int], path: Path) -> int | None:
    """Return the line of a path, or of the nearest enclosing path that has one."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def nearest(given: str, known: Iterable[str]) -> str:
    """Return ``, did you mean 'x'? Valid: ...`` for an unknown name; without the question if no name is similar."""
    names = list(known)
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(given.casefold(), list(folded), n=1)
    return f"{f', did you mean {folded[near[0]]!r}?' if near else '.'} Valid: {', '.join(names)}"


def shown(value: object, length: int = 60) -> str:
    """Return a value as messages show it, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class Findings:
    """Collect problems.

    Args:
        source: name of the schedule in messages, such as its file's name.
        lines: by path, from 1.
        compatible: whether problems that the original language silently accepted are warnings instead of errors.
    """

    def __init__(self, source: str, lines: Mapping[Path, int], *, compatible: bool = False) -> None:
        self.source, self.lines, self.compatible = source, lines, compatible
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, path: Path, text: str) -> None:
        """Record an error, with or without the compatibility switch."""
        self.errors.append(Problem(path, text))

    def warning(self, path: Path, text: str) -> None:
        """Record a warning, with or without the compatibility switch."""
        self.warnings.append(Problem(path, text))

    def lenient(self, path: Path, text: str, line: int | None = None) -> None:
        """Record what the original silently accepted as an error, or as a warning with the compatibility switch."""
        (self.warnings if self.compatible else self.errors).append(Problem(path, text, line))

    def said(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Return ``FILE:LINE: path: text`` for each problem, in the order of the file."""

        def line(problem: Problem) -> int | None:
            return line_at(self.lines, problem.path) if problem.line is None else problem.line

        def said(problem: Problem) -> str:
            number = line(problem)
            where = self.source if number is None else f"{self.source}:{number}"
            return ": ".join(part for part in (where, dotted(problem.path), problem.text) if part)

        return tuple(said(problem) for problem in sorted(problems, key=lambda problem: line(problem) or 0))

    def settle(self) -> None:
        """Raise the errors; without errors, issue the warnings as `UserWarning`.

        Raises:
            ScheduleError: with all errors.
        """
        if self.errors:
            raise ScheduleError(self.said(self.errors))
        for text in self.said(self.warnings):
            warnings.warn(text, UserWarning, stacklevel=3)
