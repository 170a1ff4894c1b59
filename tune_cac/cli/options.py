"""Options shared by several commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from analysis.io.study_options import RESULTS, Option
from trainables.gradskip.variables import EXAMPLE


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a study and the option for the folder that holds it."""
    parser.add_argument("study", metavar="STUDY", help="a study's folder, or its name under --results")
    add_results(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder that holds the studies."""
    parser.add_argument("--results", default=RESULTS, help=f"folder that holds the studies (default: {RESULTS})")


def add_ranking(parser: argparse.ArgumentParser) -> None:
    """Add the options of a ranking."""
    parser.add_argument(
        "--allowed-drop", help="how much worse the metric may be, such as 0.005 or 2%% (default: the study's)"
    )
    parser.add_argument("--top", type=int, default=20, help="rows to show (default: 20)")
    parser.add_argument(
        "--price", type=float, metavar="SHARE", help="rank by worth: the share of the training compute that a point "
        "of accuracy, or a unit of another metric, is worth, such as 0.1",
    )  # fmt: skip


def add_assignments(parser: argparse.ArgumentParser) -> None:
    """Add the flag for variables, which `read_assignments` reads."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="VARIABLE=VALUE", dest="assignments",
        help=f"a variable, such as {EXAMPLE}; may be repeated",
    )  # fmt: skip


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the flags of declared options; what is not given is None, so that the declared default counts."""
    for option in options:
        how: dict[str, Any] = {"dest": option.name, "default": None, "help": option.text.replace("%", "%%")}
        if option.type is bool:
            how["action"] = "store_true" if option.default is False else argparse.BooleanOptionalAction
        else:
            repeated = option.type not in (str, int, float)
            how |= {"metavar": option.metavar} | (
                {"action": "extend", "nargs": "+"} if repeated else {"type": option.type}
            )
        action = parser.add_argument(option.flag, **how)
        if option.rare:
            action.full_help, action.help = action.help, argparse.SUPPRESS  # type: ignore[attr-defined]


class HelpAll(argparse.Action):
    """Print the help with the rare options, too, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print it."""
        for action in parser._actions:
            action.help = getattr(action, "full_help", action.help)
        parser.print_help()
        parser.exit()


def add_compatible(parser: argparse.ArgumentParser) -> None:
    """Add the flag that accepts what Distiller accepted in a schedule."""
    parser.add_argument(
        "--compatible", action="store_true", help="warn of what Distiller silently accepted instead of refusing it"
    )
