"""What is wrong with a schedule: every problem with its place, collected, and said in one line each. Without torch."""

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
        """
        Args:
            errors: one line each, at least one, in the order of the file.
        """
        self.errors = tuple(errors)
        more = f" (and {len(errors) - 1} more: `schedule check` lists them)" if len(errors) > 1 else ""
        super().__init__(errors[0] + more)

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)  # the message is made anew in the process that unpickles it


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    path: Path
    """What it is about."""
    text: str
    """The rule, what was given, the way out."""
    line: int | None = None
    """From 1; None: that of the path."""


def dotted(path: Path) -> str:
    """A path as messages and names of search ranges write it.

    >>> dotted(("policies", 0, "pruner"))
    'policies.0.pruner'
    """
    return ".".join(map(str, path))


def line_at(lines: Mapping[Path, int], path: Path) -> int | None:
    """The line of a path, or of the nearest thing around it that has one."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def nearest(given: str, known: Iterable[str]) -> str:
    """``, did you mean 'x'? Valid: ...`` for a name that is not known; without the question where nothing is near."""
    names = list(known)
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(given.casefold(), list(folded), n=1)
    return f"{f', did you mean {folded[near[0]]!r}?' if near else '.'} Valid: {', '.join(names)}"


def shown(value: object, length: int = 60) -> str:
    """A value as messages show it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class Findings:
    """Collects what is wrong.

    Args:
        source: what messages call the schedule, such as its file's name.
        lines: by path, from 1.
        compatible: whether what the original language silently accepted is a warning instead of an error.
    """

    def __init__(self, source: str, lines: Mapping[Path, int], *, compatible: bool = False) -> None:
        self.source, self.lines, self.compatible = source, lines, compatible
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, path: Path, text: str, line: int | None = None) -> None:
        """Wrong for any reader of the language."""
        self.errors.append(Problem(path, text, line))

    def warning(self, path: Path, text: str, line: int | None = None) -> None:
        """Worth a word to any reader, and no error."""
        self.warnings.append(Problem(path, text, line))

    def lenient(self, path: Path, text: str, line: int | None = None) -> None:
        """What the original silently accepted: an error, or a warning with the compatibility switch."""
        (self.warnings if self.compatible else self.errors).append(Problem(path, text, line))

    def said(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """``FILE:LINE: path: text`` of each, in the order of the file."""

        def line(problem: Problem) -> int | None:
            return line_at(self.lines, problem.path) if problem.line is None else problem.line

        def said(problem: Problem) -> str:
            number = line(problem)
            where = self.source if number is None else f"{self.source}:{number}"
            return ": ".join(part for part in (where, dotted(problem.path), problem.text) if part)

        return tuple(said(problem) for problem in sorted(problems, key=lambda problem: line(problem) or 0))

    def settle(self) -> None:
        """Raise the errors, or else give the warnings as `UserWarning`.

        Raises:
            ScheduleError: with all errors.
        """
        if self.errors:
            raise ScheduleError(self.said(self.errors))
        for text in self.said(self.warnings):
            warnings.warn(text, UserWarning, stacklevel=3)
