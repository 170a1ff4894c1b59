"""Settings grouped by how they are replayed: those without any stop, those of the variance rule, and the others.

A configuration that compresses trains on other weights than the recorded ones, so it cannot be replayed.

The seven numbers of the variance rule (thresholds, timing, braking) are stored as columns, so that a hundred thousand
settings do not need as many objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.config import TrialConfig, field_names
from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import estimator_in
from trainables.gradskip.rules.published_batch import AutoNumbers
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME, DEFAULT_SAMPLES, VARIABLES

#: The numbers of the variance rule, by the fields of `AutoNumbers` or of `Settings`.
AUTO_COLUMNS = {v.name: v for v in VARIABLES if v.published and v.mode in ("auto", "both")}
#: Fields of a configuration that replay reads; workload and length are those of the trace.
_READ = (*BY_NAME, "forward_cache_mb", "method")
_KNOWN = frozenset(field_names())

#: A setting in any form that replay accepts.
OneSetting = Settings | TrialConfig | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Group of settings that are replayed together."""

    rows: NDArray[np.int64]
    """(n,) indices of the settings in the given order."""
    config: TrialConfig
    """Configuration of all n settings; for the variance rule, without its numbers."""
    auto: AutoNumbers | None = None
    """Numbers of the variance rule for each setting; None: all n settings equal `config`."""
    never_acts: bool = False
    """True if these settings stop nothing on any run."""
    foreign: bool = False
    """True if these settings also compress, so that they cannot be replayed."""


def batches(settings: Any) -> tuple[pd.Index, list[Batch]]:
    """Group settings by how they are replayed.

    Args:
        settings: a `Settings`, a `TrialConfig` or a mapping of its fields; a sequence of these; a mapping from labels
            to these; or a DataFrame with fields as columns, as `analysis.load` gives it (None and NaN: published
            default; other columns are not read).

    Returns:
        The index of the settings (labels of a mapping, index of the DataFrame, else 0, 1, ...), and batches that
        contain each setting once. Rows of a DataFrame that compress are in batches with `foreign`.

    Raises:
        UserError: an unknown variable, an invalid value, or a setting outside a DataFrame that compresses.
    """
    index, columns = _columns(settings)
    count = len(index)
    others = [name for name in columns if name not in AUTO_COLUMNS]
    auto = {name: _numbers(name, columns.get(name), count) for name in AUTO_COLUMNS}
    groups: dict[tuple[Any, ...], list[int]] = {}
    cells = [[_cell(name, value) for value in columns[name]] for name in others]
    for row, key in enumerate(zip(*cells, strict=True) if cells else [()] * count):
        groups.setdefault(key, []).append(row)
    found = []
    for key, places in groups.items():
        fixed = {name: value for name, value in zip(others, key, strict=True) if value is not None}
        found += _sorted_out(fixed, np.array(places, dtype=np.int64), auto)
    return index, found


def _sorted_out(
    fixed: Mapping[str, Any], rows: NDArray[np.int64], auto: Mapping[str, NDArray[np.float64]]
) -> list[Batch]:
    """Return the batches of settings that differ only in the variance rule's numbers."""
    # The variance rule's numbers have no effect under other rules, so they are left out here.
    probe = TrialConfig(**fixed)
    if probe.compresses or estimator_in(probe.method):
        return [Batch(rows=rows, config=probe, foreign=True)]
    found = []
    if probe.method != "none" and probe.gradskip_settings().mode == "auto":
        off = auto["CAC_VAR_START_THR"][rows] == -1
        if off.any():
            config = TrialConfig(**{**fixed, "CAC_VAR_START_THR": -1.0})
            found.append(Batch(rows=rows[off], config=config, never_acts=True))
        if not off.all():
            found.append(Batch(rows=rows[~off], config=probe, auto=_auto_numbers(rows[~off], auto)))
        return found
    braking = np.nan_to_num(auto["CAC_BRAKING_DISTANCE"][rows], nan=0.0).astype(np.int64)
    for distance in np.unique(braking):
        config = TrialConfig(**{**fixed, **({"CAC_BRAKING_DISTANCE": int(distance)} if distance else {})})
        found.append(Batch(rows=rows[braking == distance], config=config, never_acts=config.method == "none"))
    return found


def _auto_numbers(rows: NDArray[np.int64], auto: Mapping[str, NDArray[np.float64]]) -> AutoNumbers:
    def given(name: str, default: Any = None) -> NDArray[Any]:
        variable, values = AUTO_COLUMNS[name], auto[name][rows]
        values = np.where(np.isnan(values), variable.default if default is None else default, values)
        return values.astype(np.int64) if variable.kind is int else values

    braking = given("CAC_BRAKING_DISTANCE")
    names = ("start_itr", "start_thr", "mt_count_thr", "mt_thr", "slope_thr")
    return AutoNumbers(
        **{name: given(f"CAC_VAR_{name.upper()}") for name in names},
        # As in `Settings.sampling_interval`: by default the braking distance.
        interval=given("CAC_VAR_SAMPLES", np.where(braking > 0, braking, DEFAULT_SAMPLES)),
        braking=braking,
    )


# --- forms of settings ------------------------------------------------------------------------------------------------


def _columns(settings: Any) -> tuple[pd.Index, dict[str, Sequence[Any] | NDArray[Any]]]:
    """Return the index of the settings, and the fields that at least one setting gives, as columns."""
    if isinstance(settings, pd.DataFrame):
        for name in settings.columns:
            if str(name).startswith("CAC") and name not in BY_NAME:
                raise unknown_name("variable", str(name), BY_NAME)
        return settings.index, {name: settings[name].to_numpy() for name in _READ if name in settings.columns}
    index, rows = _rows(settings)
    names = [name for name in _READ if any(name in row for row in rows)]
    return index, {name: [row.get(name) for row in rows] for name in names}


def _rows(settings: Any) -> tuple[pd.Index, list[dict[str, Any]]]:
    one = (Settings, TrialConfig, Mapping)
    if isinstance(settings, Mapping) and settings and all(isinstance(value, one) for value in settings.values()):
        return pd.Index(list(settings)), [_fields_of(value) for value in settings.values()]
    if isinstance(settings, one):
        return pd.RangeIndex(1), [_fields_of(settings)]
    if isinstance(settings, Iterable) and not isinstance(settings, (str, bytes)):
        rows = [_fields_of(value) for value in settings]
        return pd.RangeIndex(len(rows)), rows
    raise UserError(f"settings must be Settings, a TrialConfig, several of them or a DataFrame, got {settings!r}")


def _fields_of(setting: OneSetting) -> dict[str, Any]:
    """Return the fields that a setting gives and replay reads."""
    method = str(setting.get("method", "") if isinstance(setting, Mapping) else getattr(setting, "method", ""))
    if estimator_in(method):
        raise UserError(
            f"replay predicts Gradient-Skip alone, got a setting with method {method}: what an estimator costs is "
            "known from trials alone, so train it"
        )
    if "compression" in method.split("+"):
        raise UserError(
            f"replay predicts Gradient-Skip alone, got a setting with method {method}: what compression changes was "
            "recorded nowhere; train it, or replay its Gradient-Skip with method gradskip"
        )
    if isinstance(setting, TrialConfig):
        given = {name: getattr(setting, name) for name in _READ}
        return {name: value for name, value in given.items() if value is not None}
    if isinstance(setting, Settings):
        if setting.reference:
            raise UserError("settings to replay must not have reference=True: no trial trains with the published steps")
        given = {variable.name: getattr(setting, variable.field) for variable in VARIABLES}
        return {name: value for name, value in given.items() if value != BY_NAME[name].default}
    if not isinstance(setting, Mapping):
        raise UserError(f"a setting must be Settings, a TrialConfig or a mapping of its fields, got {setting!r}")
    for name in setting:
        if name not in _KNOWN:
            raise unknown_name("variable" if str(name).startswith("CAC") else "setting", str(name), _KNOWN)
    return {name: value for name, value in setting.items() if name in _READ}


# --- values ---------------------------------------------------------------------------------------------------------


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _numbers(name: str, cells: Sequence[Any] | NDArray[Any] | None, count: int) -> NDArray[np.float64]:
    """Convert a column of the variance rule to float64, NaN where not given; raise where a value is invalid."""
    variable = BY_NAME[name]
    whole = variable.kind is int
    if cells is None:
        return np.full(count, np.nan)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        values = cells.astype(np.float64)
    else:
        values = np.array([np.nan if _is_missing(cell) else _number(name, cell) for cell in cells], dtype=np.float64)
    distinct = np.unique(values[~np.isnan(values)])
    # Valid values form an interval (START_THR also allows -1), so checking the ends and one fraction is sufficient.
    suspects = np.concatenate([distinct[:2], distinct[-1:], distinct[distinct % 1 != 0][:1] if whole else distinct[:0]])
    for value in suspects.tolist():
        variable.check(int(value) if whole and value.is_integer() else value)
    return values


def _number(name: str, cell: Any) -> Any:
    if isinstance(cell, str):
        return BY_NAME[name].read(cell)
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        BY_NAME[name].check(cell)
    return cell


def _cell(name: str, value: Any) -> Any:
    """Convert a value of another column to the type that `TrialConfig` expects, None where not given."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(item.item() if isinstance(item, np.generic) else item for item in value)
    if _is_missing(value):
        return None
    value = value.item() if isinstance(value, np.generic) else value
    if name not in BY_NAME:
        return int(value) if isinstance(value, float) and value.is_integer() else value
    variable = BY_NAME[name]
    if isinstance(value, str):
        return tuple(json.loads(value)) if value.startswith("[") else variable.read(value)
    # A DataFrame has converted integers and flags with gaps to float64.
    if variable.kind is bool and value in (0, 1):
        return bool(value)
    return int(value) if variable.kind is int and isinstance(value, float) and value.is_integer() else value
