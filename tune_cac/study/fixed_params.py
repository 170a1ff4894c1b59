"""Values given by name: ``--set NAME=VALUE`` of a trial, and values that a search fixes in all of its trials."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import search_spaces
from search_spaces import SpaceContext
from search_spaces.own_space import NOT_OF_A_SPACE, SET_BY_NAME
from search_spaces.space import ANY_RUN, corners, searched_fields
from trainables.config import TrialConfig, field_kinds, field_names
from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import BY_NAME, variable_named
from trainables.training.recipe.fields import RECIPE_FIELDS
from trainables.workload_options import TRUTH

#: Fields that have their own options.
_OPTIONS = {
    **{name: option for name, option in NOT_OF_A_SPACE.items() if name not in SET_BY_NAME},
    "workload_options": "--data, --model or --option",
    "workers": "--workers-per-trial of a search",
    "method": "--method of a trial; in a search the space says it",
    "device": "--device of a trial, --gpus-per-trial of a search",
    "threads": "--threads of a trial, --cpus-per-trial of a search",
    "saving": "--saving of a search",
    "schedule_values": "the space schedule, which searches them",
    "pruning_sensitivities": "the spaces pruning_sensitivities, or a schedule",
    "agp_weights": "the space agp, or a schedule",
}


def read_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return fields of `TrialConfig` from texts such as ``CAC_VAR_START_THR=0.97``; the last text of a name wins.

    Raises:
        UserError: no ``=``, an unknown name, or a value that is not valid.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            raise UserError(f"--set takes VARIABLE=VALUE, such as CAC_VAR_START_THR=0.97, got {text!r}")
        values[name] = read_value(name, value)
    return values


def read_value(name: str, value: Any) -> Any:
    """Return the value of a named variable or field, given as text or as the value; UserError if it is not valid."""
    if name in _OPTIONS:
        raise UserError(f"{name} has an option of its own, so it can't be set by name: use {_OPTIONS[name]}")
    if name in BY_NAME or name.startswith("CAC"):
        variable = variable_named(name)
        if isinstance(value, str):
            return variable.read(value)
        value = tuple(value) if isinstance(value, list) else value
        variable.check(value)
        return value
    if name not in field_names():
        raise unknown_name("setting", name, [field for field in field_names() if field not in _OPTIONS])
    if isinstance(value, str):
        value = _read_field(name, field_kinds()[name], value)
    TrialConfig(**{name: value})
    return value


def _read_field(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in TRUTH:
            raise UserError(f"{name} must be yes or no, got {text!r}")
        return TRUTH[text.lower()]
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    with suppress(ValueError):  # TrialConfig reports what it must be
        return kind(text)
    return text


def check_hold(
    space: str, hold: Mapping[str, Any], files: Mapping[str, str] | None = None, grid: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the checked values that a search of a space fixes, in plain types (JSON, Ray).

    Args:
        space: its name.
        hold: values by name.
        files: as in `search_spaces.load`.
        grid: likewise.

    Raises:
        UserError: an unknown name, a value that is not valid, or a field that the space searches.
    """
    # A schedule was checked when its file was read.
    from_file = ("schedule", "schedule_compatible")
    values = {name: value if name in from_file else read_value(name, value) for name, value in hold.items()}
    if values:
        run = replace(ANY_RUN, schedule=values.get("schedule"))
        searched = searched_fields(search_spaces.load(space, files, grid), run)
        for name in values:
            if name in searched and name not in RECIPE_FIELDS:  # a fixed field of the recipe is not searched
                raise UserError(
                    f"{name} is searched by space {space}, so it can't be fixed, got {name}={shown(values[name])}: "
                    "leave it out, or take another space"
                )
    if isinstance(values.get("distill_checkpoint"), str):  # trials run in another folder
        values["distill_checkpoint"] = str(Path(values["distill_checkpoint"]).absolute())
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def check_hold_on_run(
    space: str, hold: Mapping[str, Any], context: SpaceContext, files: Mapping[str, str] | None = None,
    grid: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Raise UserError if fixed values conflict with the ends of the space's ranges on this run."""
    found = search_spaces.load(space, files, grid)
    for values in corners(found, context):
        try:
            TrialConfig(**{"method": found.method, **values, **hold})
        except UserError as error:
            raise UserError(f"{shown_hold(hold)} can't be fixed in space {space}: {error}") from None


def with_schedule(hold: Mapping[str, Any], file: str | Path | None, *, compatible: bool = False) -> dict[str, Any]:
    """Return the fixed values, with the text of a schedule's file.

    Args:
        hold: fixed values by name.
        file: the schedule's file, or None.
        compatible: whether the schedule may contain what Distiller silently accepted, with a warning for each.

    Raises:
        UserError: the file cannot be read or is no schedule, or ``compatible`` is set without a file.
    """
    if file is None:
        if compatible:
            raise UserError("--compatible is about a schedule: give --schedule FILE, too")
        return dict(hold)
    from trainables.compression.schedule import read_marks

    marked = read_marks(Path(file))
    marked.read(marked.middles(), compatible=compatible)  # reports all errors with the file's name and lines
    how = {"schedule_compatible": True} if compatible else {}
    return {**hold, "schedule": _with_whole_paths(Path(file).read_text(encoding="utf-8")), **how}


def has_marks(text: str) -> bool:
    """Return whether a schedule has values to search."""
    from trainables.compression.schedule import read_marks

    return bool(read_marks(text).marks)


def _with_whole_paths(text: str) -> str:
    """Return a schedule's text with absolute paths of teacher checkpoints, because trials run in another folder."""

    def whole(found: re.Match[str]) -> str:
        file = Path(found[2].strip("'\""))
        return found[0] if file.is_absolute() or not file.exists() else f"{found[1]}{json.dumps(str(file.resolve()))}"

    return re.sub(r"(\bcheckpoint:[ \t]*)([^\s,}#]+)", whole, text)


def with_watch(hold: Mapping[str, Any], context: SpaceContext) -> dict[str, Any]:
    """Add `CAC_WATCH` to the fixed values if the model has no layer of the default kind."""
    return {**({"CAC_WATCH": list(context.watch)} if context.watch else {}), **hold}


def shown_hold(hold: Mapping[str, Any]) -> str:
    """Return the fixed values as ``--set`` takes them; ``nothing`` if there are none."""
    return " ".join(f"{name}={shown(value)}" for name, value in hold.items()) or "nothing"


def shown(value: Any) -> str:
    """Return a value as ``--set`` takes it.

    >>> shown((3, 9)), shown(True), shown(0.97)
    ('3,9', '1', '0.97')
    """
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, str) and "\n" in value:
        return f"<{len(value.splitlines())} lines>"
    return str(int(value)) if isinstance(value, bool) else str(value)
