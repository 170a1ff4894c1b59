"""Spaces of the user's own: a function in the form of ours, ``package.module:function``, and what files share with it.

The function takes an Optuna trial and a `SpaceContext` and returns a dict: fields of `TrialConfig`, and options of the
workload (keyword arguments of the user's factory) under their own names. A search starts in the middle of its ranges;
``package.module:SPACE``, a `Space`, has a start, meanings and notes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from search_spaces.space import (
    ANY_RUN,
    MOST_VISITS,
    Answers,
    Range,
    Space,
    SpaceContext,
    Suggests,
    TooManyVisits,
    corners,
    describe,
    saving_of,
)
from trainables.config import TrialConfig, field_names, method_of
from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import OF_ANY_METHOD
from trainables.gradskip.variables import variable_named
from trainables.workload_options import canonical, read_options

#: Fields that no space sets and that have no option of their own.
SET_BY_NAME = ("forward_cache_mb", *OF_ANY_METHOD)
#: Fields of a trial that a space does not set, and what sets them.
NOT_OF_A_SPACE = {
    "workload": "--workload",
    "workload_options": "each option under its own name",
    "epochs": "--epochs",
    "seed": "--seed",
    "method": "the names of what the space searches",
    "device": "--gpus-per-trial",
    "threads": "--cpus-per-trial",
    "workers": "--workers-per-trial",
    "saving": "--saving",
    "metric": "--metric of a search",
    "direction": "--direction of a search",
    "metric_unit": "--metric-unit of a search",
    "unnamed": "the key exclude of a grid file",
    "schedule": "--schedule",
    "schedule_compatible": "--compatible",
    "schedule_values": "the space schedule",
    **dict.fromkeys(SET_BY_NAME, "--set"),
}
OPTION_MEANING = "option of the workload"


def settable_fields() -> list[str]:
    """Return the fields of a trial that a space may set."""
    return [name for name in field_names() if name not in NOT_OF_A_SPACE]


def is_option(key: str) -> bool:
    """Return whether a key of a space is an option of the workload, not a field of a trial."""
    return key not in field_names()


def check_key(space: str, key: Any) -> None:
    """Raise UserError unless a key is a field that a space may set, or may be the name of a workload's option.

    A key may have a branch before a dot.
    """
    if not isinstance(key, str) or not all(part.isidentifier() for part in key.split(".")):
        raise UserError(f"a key of space {space} must be the name of a variable or an option, got {key!r}")
    field = key.rpartition(".")[2]
    if field in NOT_OF_A_SPACE:
        raise UserError(f"space {space} can't set {field}: {NOT_OF_A_SPACE[field]} says it")
    if field.startswith("CAC"):
        try:
            variable_named(field)
        except UserError as error:
            raise UserError(f"space {space}: {error}") from None


def check_range(space: str, name: str, low: Any, high: Any, step: Any, log: bool) -> None:
    """Raise UserError for an empty or impossible range."""
    rule = None
    if low > high:
        rule = f"needs low <= high, got low {low} and high {high}"
    elif log and low <= 0:
        rule = f"needs low > 0 with log, got {low}"
    elif log and step not in (None, 1):
        rule = f"takes log or step, got log and step {step}"
    elif step is not None and step <= 0:
        rule = f"needs a step > 0, got {step}"
    if rule is not None:
        raise UserError(f"space {space}: {name} {rule}")


def check_choices(space: str, name: str, choices: Iterable[Any]) -> None:
    """Raise UserError unless there are choices, each once, of types that Optuna stores."""
    seen: list[Any] = []
    for choice in choices:
        if choice is not None and not isinstance(choice, (bool, int, float, str)):
            raise UserError(f"space {space}: {name} needs choices that are numbers or texts, got {choice!r}")
        if choice in seen:
            raise UserError(f"space {space}: {name} needs different choices, got {choice!r} twice")
        seen.append(choice)
    if not seen:
        raise UserError(f"space {space}: {name} needs at least one choice, got none")


class _CheckedTrial(Answers):
    """A trial whose ranges are checked before they are asked for."""

    def __init__(self, trial: Suggests, space: str) -> None:
        self._trial, self._space = trial, space

    def answer(self, asked: Range) -> Any:
        if asked.choices is None:
            check_range(self._space, asked.name, asked.low, asked.high, asked.step, asked.log)
        else:
            check_choices(self._space, asked.name, asked.choices)
        return asked.ask(self._trial)


@dataclass(frozen=True)
class _CheckedSuggest:
    """Ask the user's function and check what it returns."""

    space: str
    function: Callable[[Suggests, SpaceContext], Any]

    def __call__(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        try:
            values = self.function(_CheckedTrial(trial, self.space), context)
        except (UserError, OSError):  # Optuna's journal may be on a full disk
            raise
        except Exception as error:  # the user's function may raise anything
            raise UserError(f"space {self.space} raised {type(error).__name__}: {error}") from error
        if not isinstance(values, Mapping):
            raise UserError(
                f"space {self.space} must return a dict, such as {{'CAC_VAR_MT_THR': 0.95}}, got "
                f"{type(values).__name__}"
            )
        for name, value in values.items():
            check_key(self.space, name)
            if is_option(name) and value is not None and not isinstance(value, (bool, int, float, str)):
                raise UserError(f"space {self.space}: {name} must be a number or a text, got {value!r}")
        return dict(values)

    def start(self, context: SpaceContext) -> Mapping[str, Any]:
        """Return the middle of each range and the first of the choices."""
        trial = _Middles()
        self(trial, context)
        return trial.params


class _Middles(Answers):
    """Takes given values, else the middle of a range and the first of the choices."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self.params: dict[str, Any] = dict(given or {})

    def answer(self, asked: Range) -> Any:
        if asked.choices is not None:
            return self.params.setdefault(asked.name, asked.choices[0])
        low, high = (end if asked.integer else float(end) for end in (asked.low, asked.high))
        return self.params.setdefault(asked.name, middle(low, high, asked.step, asked.log))


def middle(low: Any, high: Any, step: Any, log: bool) -> Any:
    """Return the middle of a range: geometric on a logarithmic scale, on the grid of a step, whole for integers."""
    from trainables.compression.schedule.reading import Mark

    found = Mark(low=low, high=high, step=step, log=log).middle()
    return min(max(low, float(f"{found:.6g}")), high) if isinstance(found, float) else found


@cache
def function_space(reference: str) -> Space:
    """Return the space of ``package.module:function``, or the `Space` of that name.

    Raises:
        UserError: it cannot be imported, is neither, or what it asks for or returns is not valid.
    """
    from trainables.workloads.user_code import import_attribute

    found = import_attribute(reference, "space")
    if isinstance(found, Space):
        made = replace(found, name=reference, suggest=_CheckedSuggest(reference, found.suggest))
    elif callable(found) and not isinstance(found, type):
        suggest = _CheckedSuggest(reference, found)
        lines = (getattr(found, "__doc__", None) or "").strip().splitlines()
        made = Space(
            name=reference,
            method="none",
            suggest=suggest,
            start=suggest.start,
            start_is_published=False,
            description=lines[0] if lines else "a function of yours",
        )
    else:
        raise UserError(
            f"space {reference} must be a function that takes a trial and a context, or a Space, got "
            f"{type(found).__name__}"
        )
    return checked(made)


def checked(space: Space) -> Space:
    """Return a space with its method, what it saves and meanings of options, after a check of its ranges' ends.

    Raises:
        UserError: it searches nothing, has too many branches, or a value that no trial can have.
    """
    try:
        values, ranges = corners(space, ANY_RUN), describe(space, ANY_RUN)
        start = dict(space.start(ANY_RUN))
    except TooManyVisits:
        raise UserError(
            f"space {space.name} has more than {MOST_VISITS} combinations of choices, and a search checks each: give "
            "numbers by low, high and step"
        ) from None
    except UserError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise UserError(f"space {space.name} raised {type(error).__name__}: {error}") from error
    if not ranges:
        raise UserError(f"space {space.name} searches nothing: ask for a range or for choices")
    names = {found.name for found in ranges}
    for name in start:
        if name not in names:
            raise UserError(f"start of space {space.name}: {unknown_name('parameter', name, names)}")
    fields = {name for corner in values for name in corner if not is_option(name)}
    for corner in values:
        try:
            method = method_of(fields)
            TrialConfig(method=method, **{name: value for name, value in corner.items() if not is_option(name)})
        except (UserError, TypeError) as error:
            raise UserError(f"space {space.name}: {error}") from None
    meanings = {name: OPTION_MEANING for corner in values for name in corner if is_option(name)}
    saving = saving_of(method, fields) or space.saving
    return replace(space, method=method, saving=saving, meanings={**meanings, **space.meanings})


# --- options of the workload ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WithOptions:
    """Put what is no field of a trial into its `workload_options`, beside the given ones."""

    space: Space
    names: tuple[str, ...]

    def suggest(self, trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        values = self.space.suggest(trial, context)
        own = {name: option_text(value) for name, value in values.items() if is_option(name)}
        fields = {name: value for name, value in values.items() if name not in own}
        if not own:
            return fields
        return {**fields, "workload_options": canonical({**read_options(context.workload_options), **own})}

    def notes(self, context: SpaceContext) -> list[str]:
        return [
            *self.space.notes(context),
            f"options of the workload: {', '.join(self.names)}; each combination of their values is also trained once "
            "without the method, as the baseline of its trials",
        ]


def with_options(space: Space) -> Space:
    """Return a space whose trials have the keys that are no fields of a trial among their `workload_options`."""
    names = tuple(dict.fromkeys(name for corner in corners(space, ANY_RUN) for name in corner if is_option(name)))
    if not names:
        return space
    made = _WithOptions(space, names)
    return replace(space, suggest=made.suggest, options=names, notes=made.notes)


def options_at_start(space: Space, given: Iterable[str]) -> tuple[str, ...]:
    """Return the options of the workload at the space's starting point; arguments as in `search_spaces`."""
    context = replace(ANY_RUN, workload_options=tuple(given))
    values = space.suggest(_Middles(space.start(context)), context)
    return tuple(values.get("workload_options", context.workload_options))


def option_text(value: Any) -> str:
    """Return a value as the text of a workload's option.

    >>> option_text(0.1), option_text(True), option_text(None)
    ('0.1', 'true', 'none')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
