"""Declaration of a command: its arguments, and the function that runs it. Errors of parsing are one line."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from analysis.io.study_options import Option
from trainables.config import check_integer
from trainables.errors import GONE


@dataclass(frozen=True)
class Argument:
    """An argument of a command."""

    names: tuple[str, ...]
    """Its flag, or the name of a positional argument."""
    settings: dict[str, Any]
    """Keywords of `argparse.ArgumentParser.add_argument`."""
    at_least: int | None = None
    """Smallest value of an integer; checked before the command runs."""
    rare: bool = False
    """True if ``--help`` leaves it to ``--help-all``."""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add it to a parser."""
        action = parser.add_argument(*self.names, **self.settings)
        if self.rare:
            action.full_help, action.help = action.help, argparse.SUPPRESS  # type: ignore[attr-defined]

    def check(self, arguments: argparse.Namespace) -> None:
        """Raise UserError for an integer that is too small."""
        name = self.names[0]
        value = None if self.at_least is None else getattr(arguments, name.lstrip("-").replace("-", "_"))
        if self.at_least is not None and value is not None:
            check_integer(name, value, self.at_least)


def argument(*names: str, help: str, at_least: int | None = None, **settings: Any) -> Argument:
    """Declare an argument; its help ends with the default, if that is a number or a text.

    Args:
        names: its flag, or the name of a positional argument.
        help: its meaning.
        at_least: smallest value, of an integer.
        settings: others of `argparse.ArgumentParser.add_argument`.
    """
    default = settings.get("default")
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        help = f"{help} (default: {default})"
    if at_least is not None:
        settings["type"] = int
    return Argument(names, {"help": help.replace("%", "%%"), **settings}, at_least)


def argument_of(option: Option) -> Argument:
    """Return the flag of a declared option; what is not given is None, so that the declared default counts."""
    how: dict[str, Any] = {"dest": option.name, "default": None}
    if option.type is bool:
        how["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
    elif option.type in (str, int, float):
        how |= {"metavar": option.metavar, "type": option.type}
    else:
        how |= {"metavar": option.metavar, "action": "extend", "nargs": "+"}
    return replace(argument(option.flag, help=option.text, **how), rare=option.rare)


class HelpAll(argparse.Action):
    """Print the help with the rare options, too, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print it."""
        for action in parser._actions:
            action.help = getattr(action, "full_help", action.help)
        parser.print_help()
        parser.exit()


@dataclass(frozen=True)
class Command:
    """A command; called with parsed arguments, it returns the exit code."""

    name: str
    """Its name on the command line."""
    function: Callable[[argparse.Namespace], int]
    """The function that runs it."""
    arguments: tuple[Argument, ...]
    """Its arguments."""
    settings: dict[str, Any]
    """Keywords of `argparse.ArgumentParser`."""

    def add_to(self, commands: Any) -> None:
        """Add it to what `argparse.ArgumentParser.add_subparsers` returned."""
        parser = commands.add_parser(self.name, **self.settings)
        for declared in self.arguments:
            declared.add_to(parser)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        parser.set_defaults(run=self)

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Check the arguments, and run it."""
        for declared in self.arguments:
            declared.check(arguments)
        return self.function(arguments)


def command(
    *arguments: Argument, help: str, **settings: Any
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Return a decorator that makes a function of parsed arguments the command of its module's name.

    Args:
        arguments: in the order of the help.
        help: its line in the list of commands.
        settings: keywords of `argparse.ArgumentParser`.
    """

    def declared(function: Callable[[argparse.Namespace], int]) -> Command:
        described = {"help": help, "description": f"{help[0].upper()}{help[1:]}.", **settings}
        return Command(function.__module__.rpartition(".")[2], function, arguments, described)

    return declared


#: Words for what an option's value must be, by the type that argparse names.
_KINDS = {"int": "an integer", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line: the rule, the value, the nearest name."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {error_text(message)}; {self.prog} --help shows what there is\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; an unknown option is told with the nearest one of its command."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            name = left[0].partition("=")[0]
            what = "option" if name.startswith("-") else "argument"
            parser = self._commands().get(getattr(found, "command", None), self)
            if name in GONE:
                parser.error(f"{what} {name} is gone: {GONE[name]}")
            parser.error(f"unknown {what} {name!r}{nearest(name, parser._option_string_actions)}")
        return found

    def _commands(self) -> dict[str | None, Parser]:
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(*found)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return words for the nearest name; empty if none is near.

    >>> nearest("--spaces", ["--space", "--trials"]), nearest("xyz", ["--space"])
    (': did you mean --space?', '')
    """
    found = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {found[0]}?" if found else ""


def error_text(message: str) -> str:
    """Return argparse's message as a rule with the value that was given.

    >>> error_text("argument --trials: invalid int value: 'abc'")
    "--trials must be an integer, got 'abc'"
    >>> error_text("argument --space: expected one argument")
    '--space needs a value'
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
