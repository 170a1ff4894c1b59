"""Reader of a Ray Tune experiment on disk: one folder per trial, with its config and one JSON line per reported row.

The files are Ray's (``ray.air.constants``): ``params.json``, ``result.json``, ``error.txt`` of each trial, and
``experiment_state-*.json`` with the state of all trials. Does not need Ray.
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
from trainables.metrics import OTHER_QUALITY, ROW

#: Name of the folder of a trial that a search of `tune_cac` wrote.
_OUR_NAME = re.compile(r"trial-(\d+)")
_DTYPES = {metric.name: metric.dtype for metric in (*ROW, *OTHER_QUALITY)}
#: Columns that every row of `trainables.trial.Trial` has had in all versions.
_SIGNATURE = frozenset({"epoch", "compute_saved", "executed_flops", "dense_flops"})
#: Keys that Ray adds to every row for its own use (``ray.tune.result.AUTO_RESULT_KEYS`` and those of its loggers).
BOOKKEEPING = frozenset({
    "timestamp", "checkpoint_dir_name", "done", "date", "pid", "hostname", "node_ip", "config", "experiment_tag",
    "time_this_iter_s", "time_since_restore", "iterations_since_restore", "trial_log_path", "should_checkpoint",
})  # fmt: skip
#: Values of ``status`` for Ray's states; a trial that has not begun or is paused counts as running.
_STATES = {"TERMINATED": "completed", "ERROR": "failed"}


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """One trial of a Ray experiment."""

    number: int
    """Number of the Optuna trial where a search of `tune_cac` named the folders, else by the order of their names."""
    ours: bool
    """True if the experiment's trials are `trainables.trial.Trial`; if not, ``config`` and ``rows`` are empty."""
    config: dict[str, Any]
    """Fields of `TrialConfig` in plain types; with defaults filled in where the config is valid."""
    parameters: dict[str, Any]
    """Ray's config as given, nested keys joined by a slash."""
    resume_from: str | None
    """Checkpoint that it continued from."""
    rows: dict[int, dict[str, Any]]
    """Its rows by epoch, ascending; the last row of an epoch that was reported more than once."""
    metrics: dict[str, Any]
    """Its last row as reported, nested keys joined by a slash, without the keys in `BOOKKEEPING`."""
    done: bool
    """True if Ray ended it; also True where a scheduler ended it before its last epoch."""
    state: str | None
    """Ray's state of the trial (``TERMINATED``, ``ERROR``, ...), None where Ray wrote none."""
    error: str | None
    """Last line of its error message, where it failed."""

    @property
    def status(self) -> str:
        """Return the status as in `analysis.load`; ``running`` also for trials that were killed without an error.

        Trials that are not `trainables.trial.Trial` are never ``pruned``, as early ends by a scheduler are not known.
        """
        if not self.ours:
            ended = "completed" if self.done else "running" if self.error is None else "failed"
            return ended if self.done or self.state is None else _STATES.get(self.state, "running")
        if self.done:
            epochs = self.config.get("epochs", 0)
            return "completed" if max(self.rows, default=0) >= epochs else "pruned"
        return "running" if self.error is None else "failed"


def is_experiment(folder: Path) -> bool:
    """Return whether Ray Tune wrote an experiment to this folder."""
    return any(
        next(folder.glob(pattern), None) is not None
        for pattern in ("experiment_state-*.json", "*/result.json", "*/params.json")
    )


def read_experiment(folder: Path) -> list[RayTrial]:
    """Return the trials of an experiment that have begun, sorted by number.

    A trial that failed before its first row may have only an ``error.txt``; its config is then not known.
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
    """Return whether the trials are `trainables.trial.Trial`, judged by their configs and, if there are any, rows."""
    reported, fields = [rows[-1] for rows in lines if rows], set(field_names())
    configs = [given["config"] for given in params if isinstance(given.get("config"), dict) and given["config"]]
    if reported:  # a user may have run trainables.trial.Trial with a few fields only
        return any(set(row) >= _SIGNATURE for row in reported) and any(set(config) <= fields for config in configs)
    return any(map(is_our_config, configs))


def _states(folder: Path) -> dict[str, str]:
    """Return Ray's state of each trial by folder name, from the newest readable state file."""
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
    """Return the rows of a ``result.json``; incomplete or damaged lines are left out, as Ray may be writing them."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)  # also parses NaN and Infinity, which Ray writes
            if isinstance(row, dict):
                rows.append(row)
    return rows


def rows_by_epoch(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the keys of a row (`trainables.metrics`) by epoch, ascending; the last row of an epoch counts."""
    rows = {}
    for line in lines:
        if isinstance(epoch := line.get("epoch"), int):
            names = [*(metric.name for metric in ROW), *(m.name for m in OTHER_QUALITY if m.name in line)]
            rows[epoch] = {name: _value(name, line.get(name)) for name in names}
    return dict(sorted(rows.items()))


def _value(name: str, value: Any) -> Any:
    """Return a column's value, None where it has the wrong type (Ray writes NumPy's NaN as the text ``null``)."""
    if _DTYPES[name] == "string":
        return value if isinstance(value, str) else None
    if not isinstance(value, (int, float)):
        return None
    return value if _DTYPES[name] == "float64" or float(value).is_integer() else None


def _params(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Ray's config of a trial: from ``params.json``, else from its last row, which also holds it."""
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
        return values  # the trial failed because of its config


def _error(folder: Path) -> str | None:
    try:
        lines = [line.strip() for line in (folder / "error.txt").read_text(errors="replace").splitlines()]
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line), "unknown error")
    return re.sub(r"^(?:\w+\.)+(?=\w+:)", "", last)  # the error's name without its module
