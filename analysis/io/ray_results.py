"""What Ray Tune leaves of an experiment: a folder a trial, with its config and one JSON line a reported row.

Files are Ray's (``ray.air.constants``): ``params.json``, ``result.json``, ``error.txt`` of a trial, and
``experiment_state-*.json``, which has the state of each. Needs no Ray.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.io.foreign import flattened, is_our_config
from trainables.config import TrialConfig, field_names
from trainables.errors import UserError
from trainables.metrics import ROW

#: How a search of ours names the folder of a trial.
_OUR_NAME = re.compile(r"trial-(\d+)")
_DTYPES = {metric.name: metric.dtype for metric in ROW}
#: Columns that every row of `trainables.trial.Trial` has had in all versions.
_SIGNATURE = frozenset({"epoch", "accuracy", "compute_saved", "executed_flops", "dense_flops"})
#: What Ray adds to every row for its own use (``ray.tune.result.AUTO_RESULT_KEYS`` and what its loggers write).
BOOKKEEPING = frozenset({
    "timestamp", "checkpoint_dir_name", "done", "date", "pid", "hostname", "node_ip", "config", "experiment_tag",
    "time_this_iter_s", "time_since_restore", "iterations_since_restore", "trial_log_path", "should_checkpoint",
})  # fmt: skip
#: Our words for Ray's states; what has not begun or is held counts as running.
_STATES = {"TERMINATED": "completed", "ERROR": "failed"}


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """One trial of a Ray experiment."""

    number: int
    """The Optuna trial's number where a search of ours named the folders, else by the order of their names."""
    ours: bool
    """Whether the experiment's trials are `trainables.trial.Trial`; if not, ``config`` and ``rows`` are empty."""
    config: dict[str, Any]
    """Fields of `TrialConfig`, in plain types; defaults filled in where the config is valid."""
    parameters: dict[str, Any]
    """Ray's config as it was given, nested keys joined by a slash."""
    resume_from: str | None
    """Checkpoint that it continued from."""
    rows: dict[int, dict[str, Any]]
    """Its rows by epoch, ascending; of rows that were reported again, the last."""
    metrics: dict[str, Any]
    """Its last row as it was reported, nested keys joined by a slash, without what Ray adds for its own use."""
    done: bool
    """Whether Ray ended it; True also where a scheduler did so before its last epoch."""
    state: str | None
    """Ray's state of it (``TERMINATED``, ``ERROR``, ...), None where Ray left none."""
    error: str | None
    """Last line of its error, where it failed."""

    @property
    def status(self) -> str:
        """As in `analysis.load`; ``running`` is what has not ended, though nobody may run it any more.

        Whether a scheduler ended another's trial early is not known, so that those are never ``pruned``.
        """
        if not self.ours:
            ended = "completed" if self.done else "running" if self.error is None else "failed"
            return ended if self.done or self.state is None else _STATES.get(self.state, "running")
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
    states = _states(folder)
    names = ("params.json", "result.json", "error.txt")
    folders = sorted({path.parent for name in names for path in folder.glob(f"*/{name}")})
    ours = [int(found[1]) for path in folders if (found := _OUR_NAME.fullmatch(path.name))]
    numbered = len(ours) == len(folders)
    lines = [_read_lines(path / "result.json") for path in folders]
    params = [_params(path, rows) for path, rows in zip(folders, lines, strict=True)]
    is_ours = _is_ours(params, lines) or (numbered and not any(params) and not any(lines))
    trials = [
        RayTrial(
            number=number,
            ours=is_ours,
            config=_config(given) if is_ours else {},
            parameters=flattened(given),
            resume_from=given.get("resume_from") if is_ours else None,
            rows=rows_by_epoch(rows) if is_ours else {},
            metrics=_metrics(rows),
            done=bool(rows and rows[-1].get("done")),
            state=states.get(path.name),
            error=_error(path),
        )
        for number, path, given, rows in zip(
            ours if numbered else range(len(folders)), folders, params, lines, strict=True
        )
    ]
    return sorted(trials, key=lambda trial: trial.number)


def _is_ours(params: list[dict[str, Any]], lines: list[list[dict[str, Any]]]) -> bool:
    """Return whether the trials are of `trainables.trial.Trial`: by their config and, if there are any, their rows."""
    reported, fields = [rows[-1] for rows in lines if rows], set(field_names())
    configs = [given["config"] for given in params if isinstance(given.get("config"), dict) and given["config"]]
    if reported:  # somebody may have run our trials with a few fields
        return any(set(row) >= _SIGNATURE for row in reported) and any(set(config) <= fields for config in configs)
    return any(map(is_our_config, configs))


def _states(folder: Path) -> dict[str, str]:
    """Ray's state of each trial by the name of its folder, from the newest file that can be read."""
    for path in sorted(folder.glob("experiment_state-*.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):
            trials = [json.loads(trial) for trial, _ in json.loads(path.read_text())["trial_data"]]
            return {trial["relative_logdir"]: trial["status"] for trial in trials}
    return {}


def _metrics(lines: list[dict[str, Any]]) -> dict[str, Any]:
    last = {name: value for name, value in (lines[-1] if lines else {}).items() if name not in BOOKKEEPING}
    # Ray writes NumPy's NaN as the text "null".
    return {name: None if value == "null" else value for name, value in flattened(last).items()}


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
    given = params.get("config", {})
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
