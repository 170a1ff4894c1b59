"""Parser whose errors are one line: the rule, the value, the nearest name; ``--help`` alone shows the usage."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from trainables.errors import GONE

#: Words for what an option's value must be, by the type that argparse names.
_KINDS = {"int": "an integer", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of one line; those of commands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {said(message)}; {self.prog} --help shows what there is\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; an unknown option is told with the nearest one of its command."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            command = self.command(getattr(found, "command", None))
            what = "option" if left[0].startswith("-") else "argument"
            name = left[0].partition("=")[0]
            if name in GONE:
                command.error(f"{what} {name} is gone: {GONE[name]}")
            command.error(f"unknown {what} {name!r}{nearest(name, command._option_string_actions)}")
        return found

    def command(self, name: str | None) -> Parser:
        """Return the parser of a command; this one if there is none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                return action.choices[name]
        return self


def nearest(name: str, known: Iterable[str]) -> str:
    """Return words for the nearest name; empty if none is near.

    >>> nearest("--spaces", ["--space", "--trials"]), nearest("xyz", ["--space"])
    (': did you mean --space?', '')
    """
    found = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {found[0]}?" if found else ""


def said(message: str) -> str:
    """Return argparse's message as a rule with the value that was given.

    >>> said("argument --trials: invalid int value: 'abc'"), said("argument --space: expected one argument")
    ("--trials must be an integer, got 'abc'", '--space needs a value')
    """
    if match := re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message):
        name, kind, value = match.groups()
        return f"{name} must be {_KINDS.get(kind, f'a {kind}')}, got {value}"
    if match := re.fullmatch(r"argument (\S+): expected (one|at least one) argument", message):
        return f"{match[1]} needs {'a value' if match[2] == 'one' else 'one value or more'}"
    if match := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
        name, value, listed = match.groups()
        choices = [choice.strip(" '") for choice in listed.split(",")]
        if name == "COMMAND" and value in GONE:
            return f"command {value} is gone: {GONE[value]}"
        what = "command" if name == "COMMAND" else f"value of {name}"
        return f"unknown {what} {value!r}{nearest(value, choices)}; valid: {', '.join(choices)}"
    if match := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{match[1]} must be given"
    return message
