"""A study folder as one tidy DataFrame: one row a trial."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.baseline import relative_to_baseline
from analysis.layout import STUDY_NAME, Layout
from trainables.config import field_kinds
from trainables.errors import UserError
from trainables.metrics import METRICS, RELATIVE, ROW

#: What is known of a trial without a result: what it executed until it failed or was interrupted.
_SO_FAR = ("search_flops", "dense_flops")

#: Columns that say which trial a row is.
IDENTITY = {"trial": "int64", "role": "string", "status": "string", "error": "string"}
#: pandas dtypes of hyperparameters by their plain type, all of which hold a missing value. Lists are JSON.
_DTYPES = {str: "string", tuple: "string", bool: "boolean", int: "float64", float: "float64"}


def load(path: str | Path) -> pd.DataFrame:
    """Read a study folder, running or finished.

    Args:
        path: the folder that a search wrote.

    Returns:
        One row a trial, by number: ``trial``, ``role`` (baseline, published, search), ``status`` (completed, failed,
        running, interrupted), ``error``, the columns of `trainables.metrics`, the fields of `TrialConfig`. Units,
        directions and meanings of the columns are in ``df.attrs["columns"]``.

    Raises:
        UserError: no study there.
    """
    layout = Layout(Path(path))
    layout.read_info()
    if _is_current(layout):
        return pd.read_parquet(layout.trials)
    return to_frame(read_journal(layout.journal))


def _is_current(layout: Layout) -> bool:
    try:
        return layout.trials.stat().st_mtime_ns >= layout.journal.stat().st_mtime_ns
    except OSError:
        return False


def read_journal(path: Path) -> list[dict[str, Any]]:
    """One record a trial: trial, role, status, error, row (result columns) and config.

    A trial that failed or was interrupted has no result; of its row only what it cost is filled in, where it is known.
    Trials that the search never ran (attribute ``skipped``, with the reason) are left out.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if not path.is_file():
        raise UserError(f"the study has no journal ({path}): its search never began; delete the folder and search anew")
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage)
        trials = study.get_trials(deepcopy=False)
    except KeyError:
        raise UserError(f"the journal {path} holds no study: its search never began; delete the folder") from None
    finally:
        optuna.logging.set_verbosity(level)
    records = []
    for trial in trials:
        attrs = trial.user_attrs
        if trial.state.name == "WAITING" or "skipped" in attrs:
            continue
        if "row" in attrs:
            status = "completed"  # told or not: a search killed before its baseline ended leaves finished rows untold
        elif trial.state.name == "FAIL":
            status = "interrupted" if "continued_by" in attrs else "failed"
        else:
            status = "running"
        records.append(
            {
                "trial": trial.number,
                "role": attrs.get("role", "search"),
                "status": status,
                "error": attrs.get("error"),
                "row": attrs.get("row") or _cost_so_far(attrs),
                "config": attrs.get("config", {}),
            }
        )
    return records


def _cost_so_far(attrs: Mapping[str, Any]) -> dict[str, Any]:
    row = attrs.get("row_so_far") or {}
    return {name: row[name] for name in _SO_FAR if row.get(name) is not None}


def to_frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Records of `read_journal` as the DataFrame that `load` gives."""
    dtypes = {**IDENTITY, **{m.name: m.dtype for m in ROW}}
    rows = []
    for record in records:
        config = {k: json.dumps(v) if isinstance(v, list) else v for k, v in record["config"].items()}
        rows.append({**{k: record[k] for k in IDENTITY}, **record["row"], **config})
    kinds = field_kinds()
    columns = [*dtypes, *kinds]
    frame = pd.DataFrame(rows).reindex(columns=columns) if rows else pd.DataFrame(columns=columns)
    for name in columns:
        dtype = dtypes.get(name) or _DTYPES[kinds[name]]
        if dtype == "int64" and frame[name].isna().any():
            dtype = "Int64"
        if name in ("epochs", "seed", "threads") and not frame[name].isna().any():
            dtype = "int64"
        frame[name] = frame[name].astype(dtype)
    frame = relative_to_baseline(frame)
    after = list(frame.columns).index("compute_saved") + 1
    relative = [m.name for m in RELATIVE]
    ordered = [c for c in frame.columns if c not in relative]
    frame = frame[[*ordered[:after], *relative, *ordered[after:]]]
    frame.attrs["columns"] = {
        name: {"unit": METRICS[name].unit, "direction": METRICS[name].direction, "meaning": METRICS[name].meaning}
        for name in frame.columns
        if name in METRICS
    }
    return frame
