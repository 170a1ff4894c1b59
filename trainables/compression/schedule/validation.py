"""Validation of arguments, with pydantic's errors reworded for this project. Does not import torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.problems import Findings, Path, nearest, shown

S = TypeVar("S", bound=ComponentConfig)

#: Rules by pydantic's error type; ``{x}`` is filled in from the error's context.
_RULES = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "dict_type": "must be a map",
    "model_type": "must be a map",
    "tuple_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entry",
}


def validated(model: type[S], given: Mapping[str, Any], path: Path, findings: Findings) -> S | None:
    """Validate arguments and return them as settings.

    Args:
        model: of the class.
        given: arguments by name.
        path: of the component, for messages.
        findings: collects the problems.

    Returns:
        The settings, or None if there is a problem.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        errors = [(tuple(part for part in found["loc"] if part != "[key]"), found) for found in error.errors()]
        misspelt = {loc: str(loc[-1]) for loc, found in errors if found["type"] == "extra_forbidden"}
        for loc, found in errors:
            if found["type"] == "missing" and any(
                other[:-1] == loc[:-1] and difflib.get_close_matches(given, [str(loc[-1])])
                for other, given in misspelt.items()
            ):
                continue  # reported already as a misspelt argument
            if found["type"] == "too_short" and any(other[: len(loc)] == loc != other for other, _ in errors):
                continue  # it has entries, but invalid ones
            findings.error((*path, *loc), _said(found, model, loc))
        return None


def _said(error: ErrorDetails, model: type[BaseModel], loc: Path) -> str:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    owner = _model_at(model, loc[:-1])
    if kind == "extra_forbidden":
        what = getattr(owner, "class_", "") or loc[-2]
        return f"unknown argument of {what}{nearest(str(loc[-1]), owner.model_fields)}"
    if kind == "missing":
        if isinstance(loc[-1], int):
            return "is missing: the list is too short"
        return f"is missing: {getattr(owner, 'class_', '') or loc[-2]} needs it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        expected = str(context["expected"])
        near = (
            nearest(given, re.findall(r"'([^']*)'", expected)).partition(" Valid")[0] if isinstance(given, str) else ""
        )
        return f"must be {expected}, got {shown(given)}{near.rstrip('.')}"
    rule = _RULES[kind].format(**{key: _number(value) for key, value in context.items()}) if kind in _RULES else None
    return f"{rule or error['msg'][0].lower() + error['msg'][1:]}, got {shown(given)}"


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _model_at(model: type[BaseModel], loc: Path) -> type[BaseModel]:
    """Return the settings class that an argument's path leads to."""
    for part in loc:
        field = model.model_fields.get(str(part))
        model = (_nested(field.annotation) if field is not None else None) or model
    return model


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _nested(part)) is not None), None)
