"""Options of a workload: NAME=VALUE texts that become keyword arguments of a class or function. Without torch."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainables.errors import UserError, unknown_name

#: Environment variable with the folder for decoded data, for workloads that keep it.
CACHE_VARIABLE = "TUNE_CAC_CACHE"
#: Options that set where something is stored and do not change the training, by workload.
PLACES = {"images": ("cache", "cache_limit_gb")}
#: Options of the workload ``script``: its command line, its working directory, a digest of the files that it names.
SCRIPT_OPTIONS = ("command", "cwd", "files")
#: Texts of truth values.
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_options(texts: Iterable[str]) -> dict[str, str]:
    """Return names and values of NAME=VALUE texts; a value may contain further ``=``.

    Raises:
        UserError: no ``=``, an invalid name, or a name given twice.
    """
    if isinstance(texts, str):
        raise UserError(f"workload options must be a list of NAME=VALUE texts, got {texts!r}")
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = str(text).partition("=")
        name = name.strip()
        if not separator or not name.isidentifier():
            raise UserError(f"a workload option must be NAME=VALUE, such as model=resnet18, got {text!r}")
        if name in found:
            raise UserError(f"a workload option must be given once, got {name} as {found[name]!r} and {value!r}")
        found[name] = value
    return found


def canonical(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return options as a configuration stores them: NAME=VALUE texts, sorted by name."""
    return tuple(f"{name}={options[name]}" for name in sorted(options))


def what_is_trained(workload: str, options: Iterable[str]) -> tuple[str, ...]:
    """Return a workload's options without those that only set where something is stored.

    >>> what_is_trained("images", ("cache=/tmp/x", "model=resnet18"))
    ('model=resnet18',)
    """
    return tuple(text for text in options if text.partition("=")[0] not in PLACES.get(workload, ()))


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of a function or class that may be options, and whether it takes any others."""
    there = inspect.signature(function).parameters
    named = {n: p for n, p in there.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in there.values())


def keywords_of(function: Callable[..., Any], options: Mapping[str, str], what: str) -> dict[str, Any]:
    """Return options, values as text, as keyword arguments in the types of a function's annotations, or its defaults.

    Raises:
        UserError: an unknown option, a missing one, or a value of the wrong type; ``what`` names the function.
    """
    parameters, takes_any = parameters_of(function)
    hints = _hints(function)
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name in parameters:
            values[name] = _read(name, text, hints.get(name), parameters[name].default, what)
        elif takes_any:
            values[name] = text
        elif not parameters:
            raise UserError(f"{what} takes no options, got {name}={text}: leave it out")
        else:
            raise unknown_name(f"option of {what}", name, parameters)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            raise UserError(f"{what} needs --option {name}=VALUE, which has no default")
    return values


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError):  # names that exist only for a type checker
        return {}


def _read(name: str, text: str, hint: Any, default: Any, what: str) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() in ("", "none"):
        return None
    kinds = tuple(kind for kind in kinds if kind not in (None, type(None)))
    if not kinds and default is not inspect.Parameter.empty and default is not None:
        kinds = (type(default),)
    kind = kinds[0] if kinds else str
    try:
        if kind is bool:
            return TRUTH[text.lower()]
        return kind(text) if kind in (int, float, Path) else text
    except (KeyError, ValueError):
        said = {bool: "yes or no", int: "an integer", float: "a number"}[kind]
        raise UserError(f"option {name} of {what} must be {said}, got {text!r}") from None
