"""What Ray Tune leaves of an experiment: a folder a trial, with its config and one JSON line a reported row.

Files are Ray's (``ray.air.constants``): ``params.json``, ``result.json``, ``error.txt``. Needs no Ray.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig, field_names
from trainables.errors import UserError
from trainables.metrics import ROW

#: How a search of ours names the folder of a trial.
_OUR_NAME = re.compile(r"trial-(\d+)")
_DTYPES = {metric.name: metric.dtype for metric in ROW}


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """One trial of a Ray experiment."""

    number: int
    """The Optuna trial's number where a search of ours named the folders, else by the order of their names."""
    config: dict[str, Any]
    """Fields of `TrialConfig`, in plain types; defaults filled in where the config is valid."""
    resume_from: str | None
    """Checkpoint that it continued from."""
    rows: dict[int, dict[str, Any]]
    """Its rows by epoch, ascending; of rows that were reported again, the last."""
    done: bool
    """Whether Ray ended it; True also where a scheduler did so before its last epoch."""
    error: str | None
    """Last line of its error, where it failed."""

    @property
    def status(self) -> str:
        """As in `analysis.load`; ``running`` is what has not ended, though nobody may run it any more."""
        if self.done:
            epochs = self.config.get("epochs", 0)
            return "completed" if max(self.rows, default=0) >= epochs else "pruned"
        return "running" if self.error is None else "failed"


def is_experiment(folder: Path) -> bool:
    """Whether Ray Tune wrote an experiment here."""
    return any(
        next(folder.glob(pattern), None) is not None
        for pattern in ("experiment_state-*.json", "*/result.json", "*/params.json")
    )


def read_experiment(folder: Path) -> list[RayTrial]:
    """The trials of an experiment that have begun, by number.

    One that failed before its first row may have an ``error.txt`` alone; its config is not known.
    """
    names = ("params.json", "result.json", "error.txt")
    folders = sorted({path.parent for name in names for path in folder.glob(f"*/{name}")})
    ours = [int(found[1]) for path in folders if (found := _OUR_NAME.fullmatch(path.name))]
    trials = []
    for number, path in zip(ours if len(ours) == len(folders) else range(len(folders)), folders, strict=True):
        lines = _read_lines(path / "result.json")
        params = _params(path, lines)
        trials.append(
            RayTrial(
                number=number,
                config=_config(params),
                resume_from=params.get("resume_from"),
                rows=rows_by_epoch(lines),
                done=bool(lines and lines[-1].get("done")),
                error=_error(path),
            )
        )
    return sorted(trials, key=lambda trial: trial.number)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``result.json``; a line that is torn or damaged is left out, as Ray may be writing it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)  # NaN and Infinity, which Ray writes, are understood
            if isinstance(row, dict):
                rows.append(row)
    return rows


def rows_by_epoch(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The columns of `trainables.metrics.ROW` by epoch, ascending; the last row of an epoch counts."""
    rows = {}
    for line in lines:
        if isinstance(epoch := line.get("epoch"), int):
            rows[epoch] = {metric.name: _value(metric.name, line.get(metric.name)) for metric in ROW}
    return dict(sorted(rows.items()))


def _value(name: str, value: Any) -> Any:
    """A value of a column, None for one that is not of its type (Ray writes NumPy's NaN as the text ``null``)."""
    if _DTYPES[name] == "string":
        return value if isinstance(value, str) else None
    if not isinstance(value, (int, float)):
        return None
    return value if _DTYPES[name] == "float64" or float(value).is_integer() else None


def _params(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Ray's config of a trial; every row holds it, too."""
    with suppress(OSError, ValueError):
        values = json.loads((folder / "params.json").read_text())
        if isinstance(values, dict):
            return values
    found = lines[-1].get("config") if lines else None
    return found if isinstance(found, dict) else {}


def _config(params: dict[str, Any]) -> dict[str, Any]:
    if not params:
        return {}
    given = params["config"] if isinstance(params.get("config"), dict) else params
    values = {name: given[name] for name in field_names() if name in given}
    try:
        return TrialConfig.from_mapping(values).to_dict()
    except (UserError, TypeError):
        return values  # one that failed for it


def _error(folder: Path) -> str | None:
    try:
        lines = [line.strip() for line in (folder / "error.txt").read_text(errors="replace").splitlines()]
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line), "unknown error")
    return re.sub(r"^(?:\w+\.)+(?=\w+:)", "", last)  # the error's name without its module
