"""Trials that no search of ours wrote: their own metrics, parameters and states as rows, and nothing beside. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.io.columns import IDENTITY, ROW_DTYPES, trial_dtypes, typed
from trainables.config import field_names
from trainables.metrics import RELATIVE

#: Fields of every `TrialConfig.to_dict`.
_OF_EVERY_TRIAL = frozenset({"workload", "epochs", "seed", "method"})
#: Columns that say what only we know; a metric or parameter of such a name is kept under a longer one.
_OURS = frozenset({"study", *IDENTITY, *(metric.name for metric in RELATIVE)})


@dataclass(frozen=True, kw_only=True)
class ForeignTrial:
    """One trial of an Optuna study or a Ray experiment that is not ours."""

    number: int
    """Its number within the study or the experiment, from 0."""
    status: str
    """As in `analysis.load`."""
    error: str | None = None
    """Why it failed, where that is known."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Values of its last report, or of the objectives, by name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Its hyperparameters by name."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that was written about it, by name."""


def is_our_config(found: Any) -> bool:
    """Return whether these are the fields of a trial of ours: no others, and those that none is without."""
    return isinstance(found, dict) and _OF_EVERY_TRIAL <= set(found) <= set(field_names())


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one, keys joined by a slash as Ray joins them.

    >>> flattened({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1})
    {'optimizer/lr': 0.1, 'optimizer/betas': [0.9, 0.99], 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}/{inner}": leaf for inner, leaf in flattened(value).items()}
        else:
            flat[str(key)] = value
    return flat


def foreign_frame(trials: Sequence[ForeignTrial]) -> pd.DataFrame:
    """One row a trial, without what is relative to a baseline.

    Returns:
        `analysis.io.columns.IDENTITY`, role always ``search``; then a column for each of their metrics, parameters and
        attributes under its own name, or behind ``metrics/``, ``parameters/`` or ``attributes/`` where another column
        has that name; then the rest of our columns, missing. Lists are JSON.
    """
    metric_names = _names(trials, "metrics", _OURS)
    taken = _OURS | set(ROW_DTYPES) | set(metric_names.values())
    parameter_names = _names(trials, "parameters", taken)
    attribute_names = _names(trials, "attributes", taken | set(trial_dtypes()) | set(parameter_names.values()))
    rows = [
        {
            **{metric_names[name]: value for name, value in trial.metrics.items()},
            **{parameter_names[name]: value for name, value in trial.parameters.items()},
            **{attribute_names[name]: value for name, value in trial.attributes.items()},
        }
        for trial in trials
    ]
    identity = typed(
        pd.DataFrame(
            [{"trial": t.number, "role": "search", "status": t.status, "error": t.error} for t in trials],
            dtype="object",
        ),
        IDENTITY,
    )
    names = [*metric_names.values(), *parameter_names.values(), *attribute_names.values()]
    theirs = {name: _column(name, [row.get(name) for row in rows]) for name in names}
    ours = typed(identity, {name: kind for name, kind in trial_dtypes().items() if name not in {*IDENTITY, *theirs}})
    return pd.concat([identity, pd.DataFrame(theirs, index=identity.index), ours], axis="columns")


def _names(trials: Sequence[ForeignTrial], kind: str, taken: frozenset[str] | set[str]) -> dict[str, str]:
    """A column's name for each of their names of a kind, in the order in which they occur."""
    found = dict.fromkeys(name for trial in trials for name in getattr(trial, kind))
    return {name: f"{kind}/{name}" if name in taken else name for name in found}


def _column(name: str, values: Sequence[Any]) -> pd.Series[Any]:
    """Their values: in our column's dtype where it holds them all, else in one that holds a missing value, too."""
    flat = [json.dumps(value) if isinstance(value, (list, tuple, dict)) else value for value in values]
    kinds = {type(value) for value in flat if value is not None}
    dtype = _dtype(kinds)
    if dtype == "Int64" and any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in flat):
        dtype = "float64"
    series = pd.Series([str(value) if dtype == "string" and value is not None else value for value in flat],
                       dtype=dtype)  # fmt: skip
    ours = trial_dtypes().get(name)
    if ours is None or (ours == "string") != (dtype == "string"):
        return series
    try:
        cast = typed(series.to_frame(name), {name: ours})[name]
    except (ValueError, TypeError):
        return series
    # A seed of 7.5 would have become 7.
    return cast if (cast.dropna() == series.dropna()).all() else series


def _dtype(kinds: set[type]) -> str:
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "Int64"
    return "float64" if kinds <= {int, float} else "string"
