"""A study as tidy DataFrames: one row per trial, and one row per epoch and trial."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.io.dtypes import IDENTITY, described, further_names, row_dtypes, trial_dtypes, typed
from analysis.io.journal import JournalTrial, read_study
from analysis.io.study_files import Layout
from analysis.metrics.ranking import relative_names, relative_to_baseline
from analysis.metrics.saving import quality_of
from trainables.metrics import ROW, current_row, named_row
from trainables.quality import Quality, quality_in


def load(path: str | Path) -> pd.DataFrame:
    """Read the trials of a study, running or finished: one row per trial, by number.

    The path is the folder that a search wrote (of which the Parquet file is read unless the journal is newer), or its
    journal. Columns are those of `analysis.io.dtypes.IDENTITY`, of `trainables.metrics` and the fields of
    `TrialConfig`, all of them whatever the study's version; their units, directions and meanings are in
    ``df.attrs["columns"]``. UserError: nothing can be read. UserWarning: part of the data is damaged; the rest is read.
    """
    layout = Layout(Path(path))
    if layout.root.is_file():
        return to_frame(read_journal(layout.root))
    table, journal = layout.trials, layout.journal
    if layout.info.exists() or not journal.exists():
        layout.read_info()  # raises where there is no study, or this version cannot read it
    if table.exists() and not (journal.exists() and journal.stat().st_mtime_ns > table.stat().st_mtime_ns):
        try:
            frame = pd.read_parquet(table)
        except (OSError, ValueError) as error:  # base classes of pyarrow's errors
            warnings.warn(f"{table} cannot be read, so the journal is: {str(error).splitlines()[0]}", stacklevel=2)
        else:
            quality = quality_of(frame)
            if {*trial_dtypes(quality), *relative_names(quality)} <= set(frame.columns):  # else of an earlier version
                return described(frame)
    return to_frame(read_journal(journal))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return a record per trial: trial, role, status, error, control, candidate, row (result columns), config.

    A trial that failed or was interrupted has no result; its row has only its cost, where known. UserError: the file
    does not exist, or contains no study.
    """
    return records_of(read_study(path))


def records_of(trials: Sequence[JournalTrial]) -> list[dict[str, Any]]:
    """Return the records of `read_journal` of a study's trials, by number."""
    for trial in trials:  # a failed trial that a later search restarted
        if "continues" in trial.user_attrs:
            trials[trial.user_attrs["continues"]].user_attrs.setdefault("continued_by", trial.number)

    def cost(row: Mapping[str, Any]) -> dict[str, Any]:  # until a trial without a result failed or was interrupted
        return {name: row[name] for name in ("search_flops", "dense_flops") if row.get(name) is not None}

    return [
        {
            **{name: trial.user_attrs.get(name) for name in IDENTITY},
            "trial": trial.number,
            "role": trial.user_attrs.get("role", "search"),
            "status": _status(trial),
            "row": current_row(trial.user_attrs.get("row") or cost(trial.user_attrs.get("row_so_far") or {})),
            "config": trial.user_attrs.get("config", {}),
        }
        for trial in trials
        if trial.state != "WAITING"
    ]


def _status(trial: JournalTrial) -> str:
    if trial.state == "PRUNED":
        return "pruned"
    # A search that was killed before its baseline ended leaves finished rows that were not reported to Optuna.
    if "row" in trial.user_attrs or trial.state == "COMPLETE":
        return "completed"
    if trial.state == "FAIL":
        return "interrupted" if "continued_by" in trial.user_attrs else "failed"
    return "running"


def to_frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Convert records of `read_journal` to the DataFrame that `load` returns."""
    rows = []
    quality = _quality_of_configs(record["config"] for record in records)
    results = [named_row(record["row"], quality) for record in records]
    for record, result in zip(records, results, strict=True):
        config = {k: json.dumps(v) if isinstance(v, list) else v for k, v in record["config"].items()}
        rows.append({**{k: record.get(k) for k in IDENTITY}, **result, **config})
    dtypes = trial_dtypes(quality, further_names(results, quality))
    frame = relative_to_baseline(typed(pd.DataFrame(rows, dtype="object"), dtypes))
    relative = relative_names(quality)
    ordered = [name for name in frame.columns if name not in relative]
    after = ordered.index("compute_saved") + 1
    return described(frame[[*ordered[:after], *relative, *ordered[after:]]])


def _quality_of_configs(configs: Iterable[Mapping[str, Any]]) -> Quality:
    """Return the metric of the trials of one study from their configs, which may be damaged or empty."""
    return quality_in(next((config for config in configs if config.get("metric")), {}))


# --- Epochs -----------------------------------------------------------------------------------------------------------
# They are read from the files of the study's Ray experiments (``ray.air.constants``), without Ray: a folder per trial
# with ``params.json``, and ``result.json``, which has one JSON line per reported row.

#: Path of the folder of a trial that a search wrote, in the folder of its experiments.
_FOLDERS, _NUMBER = "run-*/trial-*", re.compile(r"trial-(\d+)")
_DTYPES = {metric.name: metric.dtype for metric in ROW}


def history(path: str | Path) -> pd.DataFrame:
    """Read what the trials of a study, running or finished, reported after each epoch, from Ray's result files.

    A trial that continued from the checkpoint of an interrupted one gets its earlier epochs from that trial, which also
    keeps its own rows. Of an epoch that was reported more than once, the last report counts.

    One row per trial and epoch, sorted by both: ``trial``, ``role``, the columns of `trainables.metrics.ROW`. Counts
    are sums since the run's start. ``df.attrs``: ``columns`` (units and meanings) and ``quality`` (the metric).
    UserError: there is no study in the folder.
    """
    layout = Layout(Path(path))
    layout.read_info()
    records = read_journal(layout.journal)
    roles = {record["trial"]: record["role"] for record in records}
    quality = _quality_of_configs(record["config"] for record in records)
    rows = [
        {"trial": number, "role": roles.get(number), **named_row(row, quality)}
        for number, epochs in sorted(_rows_of_trials(layout.ray).items())
        for row in epochs.values()
    ]
    dtypes = {"trial": "int64", "role": "string", **row_dtypes(quality, further_names(rows, quality))}
    frame = described(typed(pd.DataFrame(rows, dtype="object"), dtypes))
    frame.attrs["quality"] = quality.all_fields()
    return frame


def _rows_of_trials(experiments: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """Return rows by trial and epoch, including those of the trial that each one continued; earlier experiments first.

    The continued trial has a lower number. It is found by the number in its folder's name, as the study may have been
    moved since.
    """
    rows: dict[int, dict[int, dict[str, Any]]] = {}
    continues: dict[int, int] = {}
    for folder in sorted(experiments.glob(_FOLDERS)):
        if (named := _NUMBER.fullmatch(folder.name)) is None:
            continue
        number = int(named[1])
        rows.setdefault(number, {}).update(_rows_by_epoch(folder / "result.json"))
        with suppress(OSError, ValueError):
            source = json.loads((folder / "params.json").read_text()).get("resume_from")
            before = _NUMBER.fullmatch(Path(source or "").parent.name)
            if before is not None and int(before[1]) < number:
                continues[number] = int(before[1])
    for number in sorted(rows):  # ascending, so that the continued trial's rows are complete
        own, earlier = rows[number], rows.get(continues.get(number, -1), {})
        first = min(own, default=0)
        rows[number] = {**{epoch: row for epoch, row in earlier.items() if epoch < first}, **dict(sorted(own.items()))}
    return rows


def _rows_by_epoch(path: Path) -> dict[int, dict[str, Any]]:
    """Return the keys of a row (`trainables.metrics`) by epoch; incomplete or damaged lines are left out.

    Ray may be writing them.
    """
    rows = {}
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found = json.loads(line)  # also parses NaN and Infinity, which Ray writes
                if isinstance(found, dict) and isinstance(epoch := found.get("epoch"), int):
                    now = current_row(found)
                    rows[epoch] = {name: _value(name, now[name]) for name in _DTYPES if name in now}
    return rows


def _value(name: str, value: Any) -> Any:
    """Return a column's value, None where it has the wrong type (Ray writes NumPy's NaN as the text ``null``)."""
    if _DTYPES[name] == "string":
        return value if isinstance(value, str) else None
    if not isinstance(value, (int, float)):
        return None
    return value if _DTYPES[name] == "float64" or float(value).is_integer() else None
