"""Values given by name: ``--set NAME=VALUE`` of a trial, and values that a search fixes in all of its trials."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces import Space, SpaceContext
from search_spaces.grid import GridPoints, grid_points
from search_spaces.grid_file import GRID, read_grid
from search_spaces.own_space import NOT_OF_A_SPACE, SET_BY_NAME
from search_spaces.space import ANY_RUN, corners, searched_fields
from trainables.config import TrialConfig, field_kinds, field_names
from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import BY_NAME, EXAMPLE, variable_named
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
    """Return fields of `TrialConfig` from texts such as `EXAMPLE`; UserError for another text, name or value."""
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            raise UserError(f"--set takes VARIABLE=VALUE, such as {EXAMPLE}, got {text!r}")
        values[name] = read_value(name, value)
    return values


def read_value(name: str, value: Any) -> Any:
    """Return the value of a named variable or field, given as text or as the value; UserError if it is not valid."""
    if name in _OPTIONS:
        raise UserError(f"{name} has an option of its own, so it can't be set by name: use {_OPTIONS[name]}")
    if name in BY_NAME or name.startswith("CAC"):
        variable = variable_named(name)
        # Truth values as YAML and Python write them, too.
        if isinstance(value, str) or (variable.kind is bool and isinstance(value, int) and value in (0, 1)):
            return variable.read(str(int(value)) if isinstance(value, int) else value)
        value = tuple(value) if isinstance(value, list) else value
        variable.check(value)
        return value
    if name not in field_names():
        raise unknown_name("setting", name, [field for field in field_names() if field not in _OPTIONS])
    kind = field_kinds()[name]
    if isinstance(value, str) and kind is bool:
        if value.lower() not in TRUTH:
            raise UserError(f"{name} must be yes or no, got {value!r}")
        value = TRUTH[value.lower()]
    elif isinstance(value, str) and kind is tuple:
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    elif isinstance(value, str):
        with suppress(ValueError):  # TrialConfig reports what it must be
            value = kind(value)
    TrialConfig(**{name: value})
    return value


def check_hold(space: Space, hold: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values that a search of a space fixes, in plain types (JSON, Ray).

    UserError: an unknown name, a value that is not valid, or a field that the space searches.
    """
    # A schedule was checked when its file was read.
    from_file = ("schedule", "schedule_compatible")
    values = {name: value if name in from_file else read_value(name, value) for name, value in hold.items()}
    if values:
        searched = searched_fields(space, replace(ANY_RUN, schedule=values.get("schedule")))
        for name in values:
            # A fixed field of the recipe is not searched.
            if name in searched and name not in (*RECIPE_FIELDS, *space.may_be_fixed):
                raise UserError(
                    f"{name} is searched by space {space.name}, so it can't be fixed, got "
                    f"{name}={shown(values[name])}: leave it out, or take another space"
                )
    if isinstance(values.get("distill_checkpoint"), str):  # trials run in another folder
        values["distill_checkpoint"] = str(Path(values["distill_checkpoint"]).absolute())
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def check_hold_on_run(space: Space, hold: Mapping[str, Any], context: SpaceContext) -> None:
    """Raise UserError if fixed values conflict with the ends of the space's ranges on this run."""
    for values in corners(space, context):
        try:
            TrialConfig(**{"method": space.method, **values, **hold})
        except UserError as error:
            raise UserError(f"{shown_hold(hold)} can't be fixed in space {space.name}: {error}") from None


def with_schedule(hold: Mapping[str, Any], file: str | Path | None, *, compatible: bool = False) -> dict[str, Any]:
    """Return the fixed values, with the text of a schedule's file.

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

    def whole(found: re.Match[str]) -> str:  # paths of teachers' checkpoints, because trials run in another folder
        path = Path(found[2].strip("'\""))
        return found[0] if path.is_absolute() or not path.exists() else f"{found[1]}{json.dumps(str(path.resolve()))}"

    text = Path(file).read_text(encoding="utf-8")
    return {**hold, "schedule": re.sub(r"(\bcheckpoint:[ \t]*)([^\s,}#]+)", whole, text), **how}


def with_watch(hold: Mapping[str, Any], context: SpaceContext) -> dict[str, Any]:
    """Add `CAC_WATCH` to the fixed values if the model has no layer of the default kind."""
    return {**({"CAC_WATCH": list(context.watch)} if context.watch else {}), **hold}


def shown_hold(hold: Mapping[str, Any]) -> str:
    """Return the fixed values as ``--set`` takes them; ``nothing`` if there are none."""
    return " ".join(f"{name}={shown(value)}" for name, value in hold.items()) or "nothing"


def shown(value: Any) -> str:
    """Return a value as ``--set`` takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, str) and "\n" in value:
        return f"<{len(value.splitlines())} lines>"
    return str(int(value)) if isinstance(value, bool) else str(value)


#: The sampler that trains distinct outcomes where their savings are known before, else learns from the baseline's run.
AUTO = "auto"
#: Names of the samplers.
SAMPLERS = (AUTO, "tpe", "random", "grid", "gp", "nsga2")


def grid_of(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the points of a grid file (`read_grid`), given by its path, as a map, or as the points themselves.

    UserError: the file cannot be read or is no grid.
    """
    if given is None or (isinstance(given, Mapping) and "settings" in given):
        return given
    if isinstance(given, Mapping):
        return read_grid(json.dumps(given), "<grid>", _read)
    try:
        return read_grid(Path(given).read_text(encoding="utf-8-sig"), str(given), _read)
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--grid must be a file in YAML, {given} cannot be read: {said}") from None


def _read(name: str, given: Any) -> Any:
    kind = field_kinds().get(name)
    # As --set reads it, but true and false are no numbers.
    value = read_value(name, given if isinstance(given, bool) and kind is not bool else shown(given))
    return float(value) if kind is float else value


def check_points(points: Mapping[str, Any], hold: Mapping[str, Any]) -> None:
    """Raise UserError for a point of a grid file whose values cannot be had together."""
    for number, point in enumerate(points["settings"], start=1):
        try:
            TrialConfig.from_mapping({**point, **hold})
        except UserError as error:
            raise UserError(f"point {number} of the grid ({shown_hold(point)}) can't be: {error}") from None


def points_of(space: Space, context: SpaceContext | None) -> GridPoints:
    """Return the points that a grid search trains; the context is None for a script, known after its baseline alone.

    UserError: the space is no grid, or a script's is no grid file.
    """
    if context is None and space.name != GRID:
        raise UserError(
            f"a grid over space {space.name} may depend on the run, which a script tells when its baseline has ended: "
            "give the values to try in a grid file (--grid FILE), or take another --sampler"
        )
    return grid_points(space, context or ANY_RUN)


def trials_in_all(before: int, more: int | None, grid: GridPoints | None) -> int:
    """Return the number of trials of a study with those that a search adds (None: all of a grid's points)."""
    asked = math.inf if more is None else before + more
    return int(asked if grid is None else min(asked, 1 + len(grid)))  # the baseline and the points
