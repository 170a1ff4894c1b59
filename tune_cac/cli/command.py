"""Declaration of a command: its arguments, and the function that runs it. Errors of parsing are one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from analysis.io.study_options import Option
from trainables.errors import GONE, nearest_name, unknown_name


@dataclass(frozen=True)
class Argument:
    """An argument of a command: its flag or the name of a positional argument, and argparse's keywords."""

    name: str
    settings: dict[str, Any]
    rare: bool = False  # true if ``--help`` leaves it to ``--help-all``


def argument(name: str, *, help: str, at_least: int | None = None, **settings: Any) -> Argument:
    """Declare an argument, an integer if it has a smallest value; its help ends with a default number or text."""
    default = settings.get("default")
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        help = f"{help} (default: {default})"
    if at_least is not None:
        settings["type"] = _integer_from(at_least)
    return Argument(name, {"help": help.replace("%", "%%"), **settings})


def _integer_from(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if (value := int(text)) < low:
            raise argparse.ArgumentTypeError(f"must be an integer >= {low}, got {value}")
        return value

    return integer


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
    """A command's name, the function of parsed arguments that returns its exit code, and argparse's keywords."""

    name: str
    function: Callable[[argparse.Namespace], int]
    arguments: tuple[Argument, ...]
    settings: dict[str, Any]

    def add_to(self, commands: Any) -> None:
        """Add it to what `argparse.ArgumentParser.add_subparsers` returned."""
        parser = commands.add_parser(self.name, **self.settings)
        for declared in self.arguments:
            action = parser.add_argument(declared.name, **declared.settings)
            if declared.rare:
                action.full_help, action.help = action.help, argparse.SUPPRESS
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        parser.set_defaults(run=self.function)


def command(
    *arguments: Argument, help: str, **settings: Any
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Return a decorator that makes a function of parsed arguments the command of its module's name, with hyphens.

    ``help`` is its line in the list of commands, ``settings`` are keywords of `argparse.ArgumentParser`.
    """

    def declared(function: Callable[[argparse.Namespace], int]) -> Command:
        described = {"help": help, "description": f"{help[0].upper()}{help[1:]}.", **settings}
        name = function.__module__.rpartition(".")[2].replace("_", "-")
        return Command(name, function, arguments, described)

    return declared


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
            parsers = [one.choices for one in self._actions if isinstance(one, argparse._SubParsersAction)]
            parser = parsers[0].get(found.command, self) if parsers else self
            if name in GONE:
                parser.error(f"{what} {name} is gone: {GONE[name]}")
            near = nearest_name(name, parser._option_string_actions)
            parser.error(f"unknown {what} {name!r}{f': did you mean {near}?' if near else ''}")
        return found


#: What an option's value must be, by the function that reads it as argparse names it.
_KINDS = {"int": "an integer", "integer": "an integer", "float": "a number"}


def error_text(message: str) -> str:
    """Return argparse's message as a rule with the value that was given.

    >>> error_text("argument --trials: invalid int value: 'abc'")
    "--trials must be an integer, got 'abc'"
    >>> error_text("argument --space: expected one argument")
    '--space needs a value'
    """
    if match := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{match[1]} must be given"
    match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if match is None:
        return message
    name, reason = match.groups()
    if match := re.fullmatch(r"invalid (\w+) value: (.*)", reason):
        return f"{name} must be {_KINDS[match[1]]}, got {match[2]}"
    if match := re.fullmatch(r"expected (one|at least one) argument", reason):
        return f"{name} needs {'a value' if match[1] == 'one' else 'one value or more'}"
    if match := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", reason, re.DOTALL):
        choices = [choice.strip(" '") for choice in match[2].split(",")]
        return str(unknown_name("command" if name == "COMMAND" else f"value of {name}", match[1], choices))
    return f"{name} {reason}"
