"""Studies, Ray experiments, journals and Parquet files as one tidy DataFrame: one row per trial."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.io.columns import IDENTITY, described, further_names, side_by_side, trial_dtypes, typed
from analysis.io.foreign import ForeignTrial, foreign_frame, is_our_config
from analysis.io.journal import JournalStudy, JournalTrial, read_study
from analysis.io.layout import STUDY_NAME, Layout
from analysis.io.ray_results import RayTrial, read_experiment
from analysis.io.sources import Source, distinct_names, sources
from analysis.metrics.baseline import relative_names, relative_to_baseline
from analysis.metrics.controls import SHORTER
from analysis.metrics.quality import quality_of
from trainables.errors import UserError
from trainables.metrics import RELATIVE, named_row
from trainables.quality import Quality, quality_in

#: Columns of a trial without a result: the FLOPs until it failed or was interrupted.
_SO_FAR = ("search_flops", "dense_flops")
#: Columns that every Parquet file of trials must have.
_NEEDED = ("trial", "status")


def load(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Read the trials of one or several studies, running or finished.

    Args:
        path: the folder that a search wrote; or the folder of a Ray experiment whose trials are
            `trainables.trial.Trial`, a study's own (``ray/run-000``) or any other; or an Optuna journal; or a Parquet
            file of trials; or several of these. For a study, the Parquet file is read unless the journal is newer. Ray
            experiments and Optuna studies of other programs than `tune_cac` can be read, too.

    Returns:
        One row per trial, by number: ``trial``, ``role`` (baseline, published, search, cut, control, candidate),
        ``status`` (completed, failed, running, interrupted, pruned), ``error``, ``control`` (kind of control),
        ``candidate`` (number of the trial that it confirms) and ``options`` (options of the workload that the space
        searches, as NAME=VALUE texts) and ``of_epochs`` (epochs of the full run, for a trial that trains fewer), each
        missing for others; the columns of `trainables.metrics`; the
        fields of `TrialConfig`. All columns always exist, whatever the study's version. Units, directions and meanings
        of the columns are in ``df.attrs["columns"]``.

        For several paths, all rows, with their study's name in a first column ``study``, which does not exist for one
        path. Each trial is compared with the baseline of its own study.

        A Ray experiment of `trainables.trial.Trial` has no roles: a trial without a method is the baseline, or a
        control if it is shorter than another trial without a method of its workload. A trial is pruned where Ray ended
        it before its last epoch, and running where Ray has not ended it.

        For an experiment or a journal of another program: its states, metrics and parameters, and nothing else.
        Metrics (Ray: the last row; Optuna: the objectives by name, ``value`` or ``values_0``, ... if they have none),
        parameters (Ray's nested keys joined by a slash) and Optuna's user attributes are columns of their own names,
        with the prefix ``metrics/``, ``parameters/`` or ``attributes/`` where another column has the name. A metric
        named like a column of `trainables.metrics`, such as ``accuracy``, fills that column; the other columns are
        missing. Every such trial has the role ``search``; one that Ray's scheduler ended early has the status
        completed, as Ray does not record early ends.

    Raises:
        UserError: nothing can be read.

    Warns:
        UserWarning: part of the data is damaged; the rest is read.
    """
    found = sources(path)
    if len(found) == 1:
        return _load_one(found[0])
    return side_by_side(distinct_names(found), [_load_one(source) for source in found])


def _load_one(source: Source) -> pd.DataFrame:
    if source.kind == "parquet":
        return _read_parquet_or_journal(source.path, Layout(source.path.parent).journal)
    if source.kind == "journal":
        return _of_journal(source.path)
    if source.kind == "ray":
        trials = read_experiment(source.path)
        if all(trial.ours for trial in trials):
            return to_frame(_records_of_experiment(trials))
        return foreign_trials([_foreign(trial) for trial in trials])
    layout = Layout(source.path)
    if layout.info.exists():
        layout.read_info()  # raises where this version cannot read the study
    if _is_current(layout):
        return _read_parquet_or_journal(layout.trials, layout.journal)
    return _of_journal(layout.journal)


def _of_journal(path: Path) -> pd.DataFrame:
    study = read_study(path)
    if is_ours(study):
        return to_frame(_records(study))
    begun = [trial for trial in study.trials if trial.state != "WAITING"]
    return foreign_trials([_foreign_of(trial, study.metric_names) for trial in begun])


#: Values of ``status`` for Optuna's states of trials that are not of `tune_cac`.
_FOREIGN_STATES = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed"}


def is_ours(study: JournalStudy) -> bool:
    """Return whether a search of `tune_cac` wrote the study, judged by its name and its trials' configs."""
    configs = [trial.user_attrs.get("config") for trial in study.trials if trial.values or trial.user_attrs]
    return any(map(is_our_config, configs)) or (study.name == STUDY_NAME and None not in configs)


def foreign_trials(trials: Sequence[ForeignTrial]) -> pd.DataFrame:
    """Return the frame of trials that are not of `tune_cac`.

    Columns that need a baseline are missing; so is `saved` where a metric with the name of one of our columns is text.
    """
    frame = foreign_frame(trials)
    try:
        return described(_with_relative(frame))
    except UserError:  # a metric with the name of one of our columns is not a number
        return described(pd.concat([frame, typed(frame, {metric.name: metric.dtype for metric in RELATIVE})], axis=1))


def _foreign(trial: RayTrial) -> ForeignTrial:
    return ForeignTrial(
        number=trial.number,
        status=trial.status,
        error=trial.error if trial.status == "failed" else None,
        metrics=trial.metrics,
        parameters=trial.parameters,
    )


def _foreign_of(trial: JournalTrial, names: Sequence[str]) -> ForeignTrial:
    values = trial.values or []
    names = names or (["value"] if len(values) == 1 else [f"values_{place}" for place in range(len(values))])
    return ForeignTrial(
        number=trial.number,
        status=_FOREIGN_STATES.get(trial.state, "running"),
        metrics=dict(zip(names, values, strict=False)),
        parameters=trial.params(),
        attributes=trial.user_attrs,
    )


def _is_current(layout: Layout) -> bool:
    """Return whether the study's Parquet file exists and is at least as new as its journal, if there is a journal."""
    if not layout.trials.exists() or not layout.journal.exists():
        return layout.trials.exists()
    return layout.trials.stat().st_mtime_ns >= layout.journal.stat().st_mtime_ns


def _read_parquet_or_journal(path: Path, journal: Path) -> pd.DataFrame:
    """Read a Parquet file; where it is damaged, warn and read the journal in the same folder."""
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        reason = str(error).splitlines()[0]
        if not journal.exists():
            raise UserError(f"{path} cannot be read, and no journal is beside it: {reason}") from None
        warnings.warn(f"{path} cannot be read, so the journal is: {reason}", stacklevel=2)
        return _of_journal(journal)
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise UserError(f"a Parquet file of trials must have the columns {', '.join(_NEEDED)}, {path} lacks {missing}")
    return _completed(frame)


def _completed(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the columns that a frame of an earlier version lacks; return a frame of this version as it is."""
    quality = quality_of(frame)
    dtypes = trial_dtypes(quality)
    expected = [*dtypes, *relative_names(quality)]
    if set(expected) <= set(frame.columns):
        return described(frame)
    missing = {name: dtype for name, dtype in dtypes.items() if name not in frame.columns}
    more = [name for name in frame.columns if name not in expected]
    full = pd.concat([frame, typed(frame, missing)], axis="columns")
    return described(_with_relative(full[[*more, *dtypes]]))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return a record per trial: trial, role, status, error, control, candidate, row (result columns), config.

    A trial that failed or was interrupted has no result; its row has only its cost, where known.

    Raises:
        UserError: the file does not exist, or contains no study.
    """
    return _records(read_study(path))


def _records(study: JournalStudy) -> list[dict[str, Any]]:
    for trial in study.trials:  # a failed trial that a later search restarted
        if "continues" in trial.user_attrs:
            study.trials[trial.user_attrs["continues"]].user_attrs.setdefault("continued_by", trial.number)
    return [_record(trial) for trial in study.trials if trial.state != "WAITING"]


def _record(trial: JournalTrial) -> dict[str, Any]:
    attrs = trial.user_attrs
    return {
        "trial": trial.number,
        "role": attrs.get("role", "search"),
        "status": _status(trial),
        "error": attrs.get("error"),
        "control": attrs.get("control"),
        "candidate": attrs.get("candidate"),
        "options": attrs.get("options"),
        "of_epochs": attrs.get("of_epochs"),
        "row": attrs.get("row") or _cost_so_far(attrs),
        "config": attrs.get("config", {}),
    }


def _status(trial: JournalTrial) -> str:
    if trial.state == "PRUNED":
        return "pruned"
    # A search that was killed before its baseline ended leaves finished rows that were not reported to Optuna.
    if "row" in trial.user_attrs or trial.state == "COMPLETE":
        return "completed"
    if trial.state == "FAIL":
        return "interrupted" if "continued_by" in trial.user_attrs else "failed"
    return "running"


def _cost_so_far(attrs: Mapping[str, Any]) -> dict[str, Any]:
    row = attrs.get("row_so_far") or {}
    return {name: row[name] for name in _SO_FAR if row.get(name) is not None}


def _records_of_experiment(trials: list[RayTrial]) -> list[dict[str, Any]]:
    """Return records in the form of `read_journal`."""
    records = []
    for trial, (role, control) in zip(trials, roles_by_method(trials), strict=True):
        row = trial.rows[max(trial.rows)] if trial.rows else {}
        if trial.status not in ("completed", "pruned"):
            row = {name: row[name] for name in _SO_FAR if name in row}
        records.append(
            {
                "trial": trial.number,
                "role": role,
                "status": trial.status,
                "error": trial.error if trial.status == "failed" else None,
                "control": control,
                "row": row,
                "config": trial.config,
            }
        )
    return records


def roles_by_method(trials: list[RayTrial]) -> list[tuple[str, str | None]]:
    """Infer role and control of each trial of a Ray experiment from its method and length; Ray does not store them."""
    dense = [trial.config for trial in trials if trial.config.get("method") == "none"]
    longest: dict[str, int] = {}
    for config in dense:
        longest[config["workload"]] = max(longest.get(config["workload"], 0), config["epochs"])
    roles: list[tuple[str, str | None]] = []
    for trial in trials:
        config = trial.config
        if config not in dense:
            roles.append(("search", None))
        elif config["epochs"] == longest[config["workload"]]:
            roles.append(("baseline", None))
        else:
            roles.append(("control", SHORTER))
    return roles


def to_frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Convert records of `read_journal` to the DataFrame that `load` returns."""
    rows = []
    quality = quality_of_configs(record["config"] for record in records)
    results = [named_row(record["row"], quality) for record in records]
    for record, result in zip(records, results, strict=True):
        config = {k: json.dumps(v) if isinstance(v, list) else v for k, v in record["config"].items()}
        rows.append({**{k: record.get(k) for k in IDENTITY}, **result, **config})
    dtypes = trial_dtypes(quality, further_names(results, quality))
    return described(_with_relative(typed(pd.DataFrame(rows, dtype="object"), dtypes)))


def quality_of_configs(configs: Iterable[Mapping[str, Any]]) -> Quality:
    """Return the metric of the trials of one study from their configs, which may be damaged or empty."""
    return quality_in(next((config for config in configs if config.get("metric")), {}))


def _with_relative(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with the columns relative to the baseline, placed after `compute_saved`."""
    frame = relative_to_baseline(frame)
    relative = relative_names(quality_of(frame))
    ordered = [name for name in frame.columns if name not in relative]
    after = ordered.index("compute_saved") + 1
    return frame[[*ordered[:after], *relative, *ordered[after:]]]
