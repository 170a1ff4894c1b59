"""Signature and documentation of a function whose keywords are declared options."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

from analysis.io.study_options import options_of
from trainables.errors import unknown_name

_Result = TypeVar("_Result")
_Keywords = ParamSpec("_Keywords")


@overload
def with_options(
    declared: Callable[_Keywords, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Keywords, _Result]]: ...


@overload
def with_options(
    declared: type, *, on_resume: Literal[True]
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]: ...


def with_options(declared: Any, *, on_resume: bool = False) -> Any:
    """Return a decorator that gives a function the options of a dataclass as its keywords.

    The function takes them as ``**given``. Its signature and docstring list them, the latter in place of its line
    ``given: ...``; an unknown keyword raises UserError with the nearest one.

    Args:
        declared: a dataclass of options (`analysis.io.study_options.option`).
        on_resume: whether to take only those that a resumed study takes anew.
    """
    options = {found.name: found for found in options_of(declared) if found.on_resume or not on_resume}
    keywords = inspect.signature(declared).parameters

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        own = [
            found for found in inspect.signature(function).parameters.values() if found.kind is not found.VAR_KEYWORD
        ]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> _Result:
            for name in given:
                if name not in options and name not in [p.name for p in own]:
                    raise unknown_name("option", name, options)
            return function(*args, **given)

        checked.__signature__ = inspect.Signature([*own, *(keywords[name] for name in options)])  # type: ignore[attr-defined]
        listed = "\n".join(
            textwrap.fill(f"{name}: {found.text}.", 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, found in options.items()
        )
        checked.__doc__ = _with_arguments(inspect.cleandoc(function.__doc__ or ""), listed)
        return checked

    return decorate


def _with_arguments(text: str, listed: str) -> str:
    """Return a docstring with the options in place of its line ``    given: ...``."""
    return re.sub(r"^    given: .*$", lambda _: listed, text, count=1, flags=re.MULTILINE)
