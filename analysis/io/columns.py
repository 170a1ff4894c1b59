"""Columns of the frames of this package, and trials that no search of `tune_cac` wrote. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.metrics.saving import quality_of
from trainables.config import field_kinds, field_names
from trainables.metrics import METRICS, RELATIVE, metrics_of, row_metrics
from trainables.quality import ACCURACY, QUALITY_FIELDS, Quality

# --- Columns: order, nullable dtypes, and their descriptions in `df.attrs` --------------------------------------------

#: Columns that identify the trial of a row.
IDENTITY: dict[str, str] = {
    "trial": "int64",
    "role": "string",
    "status": "string",
    "error": "string",
    "control": "string",
    "candidate": "Int64",
    "options": "string",
    "of_epochs": "Int64",
}
#: Nullable pandas dtypes of hyperparameters by their plain type. Lists are JSON.
_BY_KIND = {str: "string", tuple: "string", bool: "boolean", int: "float64", float: "float64"}
#: Hyperparameters that every trial has: integers, unless a value is unknown.
_ALWAYS = ("epochs", "seed", "threads")


def row_dtypes(quality: Quality = ACCURACY, further: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns that trials report, in order, with their dtypes.

    Args:
        quality: the metric by which they are compared.
        further: further metrics of the trials, which stand after it.
    """
    found = {}
    for name, metric in row_metrics(quality).items():
        found[name] = metric.dtype
        if name == quality.test:
            found |= dict.fromkeys(further, "float64")
    return found


def further_names(rows: Iterable[Mapping[str, object]], quality: Quality) -> list[str]:
    """Return the further metrics of named rows (`trainables.metrics.named_row`), in the order of their appearance."""
    known = {*metrics_of(quality), *IDENTITY, *field_kinds(), "run_facts"}
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in known]


def trial_dtypes(quality: Quality = ACCURACY, further: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns of a frame of trials, in order, with their dtypes; without those relative to the baseline.

    Args are those of `row_dtypes`.
    """
    config = {name: _BY_KIND[kind] for name, kind in field_kinds().items()}
    return {**IDENTITY, **row_dtypes(quality, further), **config}


def typed(frame: pd.DataFrame, dtypes: Mapping[str, str]) -> pd.DataFrame:
    """Return the named columns in this order and with these dtypes; a column that the frame lacks is all missing.

    A column of integers with a missing value is ``Int64``.
    """
    columns, found = {}, {}
    for name, dtype in dtypes.items():
        column = frame[name] if name in frame.columns else pd.Series(None, index=frame.index, dtype="object")
        missing = column.isna().any()
        if missing and dtype == "int64":
            dtype = "Int64"
        columns[name], found[name] = column, "int64" if name in _ALWAYS and not missing else dtype
    return pd.DataFrame(columns, index=frame.index).astype(found)


class Descriptions(dict[str, dict[str, Any]]):
    """Descriptions of columns; pandas deep-copies ``attrs`` at each access to a column, and these never change."""

    def __deepcopy__(self, memo: Any) -> Descriptions:
        """Return itself."""
        return self


def described(frame: pd.DataFrame) -> pd.DataFrame:
    """Store unit, direction and meaning of each result column in ``frame.attrs["columns"]``; return the frame."""
    known = dict(METRICS)
    if "metric" in frame.columns:
        for _, row in frame[list(QUALITY_FIELDS)].drop_duplicates().iterrows():
            known |= metrics_of(quality_of(row))
    frame.attrs["columns"] = Descriptions(
        (name, {"unit": known[name].unit, "direction": known[name].direction, "meaning": known[name].meaning})
        for name in frame.columns
        if name in known
    )
    return frame


def side_by_side(names: Sequence[str], frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate frames, with the name of each in a first column ``study``.

    Where a frame already has a column ``study``, the new values are the frame's name, a slash and the old value.
    """
    named = []
    for name, frame in zip(names, frames, strict=True):
        study = pd.Series(name, index=frame.index, dtype="string")
        if "study" in frame.columns:
            study = study + "/" + frame["study"].astype("string")
        named.append(pd.concat([study.rename("study"), frame.drop(columns="study", errors="ignore")], axis="columns"))
    return described(pd.concat(named, ignore_index=True))


# --- Trials that no search of `tune_cac` wrote ------------------------------------------------------------------------

#: Fields of every `TrialConfig.to_dict`.
_OF_EVERY_TRIAL = frozenset({"workload", "epochs", "seed", "method"})
#: Columns that only `tune_cac` fills; a metric or parameter with one of these names gets a prefix.
_OURS = frozenset({"study", *IDENTITY, *(metric.name for metric in RELATIVE)})


@dataclass(frozen=True, kw_only=True)
class ForeignTrial:
    """One trial of an Optuna study or a Ray experiment that `tune_cac` did not write."""

    number: int
    """Its number within the study or the experiment, from 0."""
    status: str
    """As in `analysis.load`."""
    error: str | None = None
    """Reason of its failure, where known."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Values of its last report, or of its objectives, by name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Its hyperparameters by name."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that is stored for it, by name."""


def is_our_config(found: Any) -> bool:
    """Return whether this is a dict of fields of `TrialConfig` only, with those that every trial has."""
    return isinstance(found, dict) and _OF_EVERY_TRIAL <= set(found) <= set(field_names())


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings, keys joined by a slash as Ray joins them.

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
    """Return a frame with one row per trial, without the columns relative to a baseline.

    Returns:
        `IDENTITY`, role always ``search``; then a column for each metric, parameter and attribute of the trials under
        its own name, or with the prefix ``metrics/``, ``parameters/`` or ``attributes/`` where another column has that
        name; then the other columns of `trial_dtypes`, all missing. Lists are JSON.
    """
    ours = trial_dtypes()
    identity = [{"trial": t.number, "role": "search", "status": t.status, "error": t.error} for t in trials]
    theirs: dict[str, pd.Series[Any]] = {}
    for kind, taken in (
        ("metrics", _OURS),
        ("parameters", _OURS | set(row_dtypes())),
        ("attributes", _OURS | set(ours)),
    ):
        before = set(theirs)
        for name in dict.fromkeys(name for trial in trials for name in getattr(trial, kind)):
            column = f"{kind}/{name}" if name in taken | before else name
            theirs[column] = _column(column, [getattr(trial, kind).get(name) for trial in trials])
    first = typed(pd.DataFrame(identity, dtype="object"), IDENTITY)
    last = typed(first, {name: dtype for name, dtype in ours.items() if name not in {*IDENTITY, *theirs}})
    return pd.concat([first, pd.DataFrame(theirs, index=first.index), last], axis="columns")


def _column(name: str, values: Sequence[Any]) -> pd.Series[Any]:
    """Return a column of values, with the dtype that this package gives it if all values fit, else a nullable one."""
    flat: list[Any] = [json.dumps(value) if isinstance(value, (list, tuple, dict)) else value for value in values]
    kinds = {type(value) for value in flat if value is not None}
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in flat):
        dtype = "Int64"
    else:
        dtype = "boolean" if kinds == {bool} else "float64" if kinds <= {int, float} else "string"
    if dtype == "string":
        flat = [None if value is None else str(value) for value in flat]
    series, ours = pd.Series(flat, dtype=dtype), trial_dtypes().get(name)
    if ours is None or (ours == "string") != (dtype == "string"):
        return series
    try:
        cast = typed(series.to_frame(name), {name: ours})[name]
    except (ValueError, TypeError):
        return series
    # A seed of 7.5 would have become 7.
    return cast if (cast.dropna() == series.dropna()).all() else series
