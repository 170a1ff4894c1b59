"""Studies, Ray experiments, journals and Parquet files as one tidy DataFrame: one row per trial."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd

from analysis.io.dtypes import IDENTITY, described, further_names, row_dtypes, side_by_side, trial_dtypes, typed
from analysis.io.journal import LINE_BEGIN, JournalStudy, JournalTrial, read_study
from analysis.io.layout import Layout
from analysis.metrics.ranking import SHORTER, relative_names, relative_to_baseline
from analysis.metrics.saving import quality_of
from trainables.config import TrialConfig, field_names
from trainables.errors import UserError
from trainables.metrics import ROW, current_row, named_row
from trainables.quality import Quality, quality_in

# --- Recognition of what a path contains, and names for several paths -------------------------------------------------

#: One path or several.
Paths: TypeAlias = "str | Path | Iterable[str | Path]"
Kind: TypeAlias = Literal["study", "ray", "journal", "parquet"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A path from which trials are read."""

    path: Path
    """Path as given."""
    kind: Kind
    """A study's folder, a Ray experiment's folder, an Optuna journal, or a Parquet file of trials."""

    @property
    def study(self) -> Path:
        """Return the path that gives its name: a folder itself, a file's study folder, else the file without suffix."""
        path = self.path.resolve()
        if self.kind in ("study", "ray"):
            return path
        return path.parent if Layout(path.parent).info.exists() else path.with_suffix("")


def sources(paths: Paths) -> list[Source]:
    """Return a source for each path.

    Raises:
        UserError: no path is given, or a path contains nothing that can be read.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise UserError("at least one path must be given: the folder of a study or of a Ray experiment, or a file")
    return [Source(path=Path(path), kind=recognise(Path(path))) for path in given]


def recognise(path: Path) -> Kind:
    """Determine what a path contains; UserError if it contains nothing that can be read."""
    if path.is_file():
        try:
            with path.open("rb") as file:
                begin = file.read(len(LINE_BEGIN))
        except OSError:
            begin = b""  # decide by the name; the reader reports why the file cannot be read
        if path.suffix == ".parquet" or begin.startswith(b"PAR1"):
            return "parquet"
        if path.suffix == ".journal" or begin.startswith(LINE_BEGIN):
            return "journal"
        raise UserError(f"a file of trials must be an Optuna journal or a Parquet file, {path} is neither")
    layout = Layout(path)
    if any(file.exists() for file in (layout.info, layout.journal, layout.trials)):
        return "study"
    if is_experiment(path):
        return "ray"
    inside = [child.name for child in sorted(path.glob("*/")) if Layout(child).info.exists() or is_experiment(child)]
    if inside:
        names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        raise UserError(f"no study in {path}, but in folders of it: give one or a list of them ({names})")
    raise UserError(
        f"no study in {path}: give the folder that a search wrote (it holds {layout.info.name}), the folder of a Ray "
        "experiment, an Optuna journal or a trials.parquet"
    )


def distinct_names(found: list[Source]) -> list[str]:
    """Return a unique name for each source: its study's name, preceded by as many parent folders as needed.

    Raises:
        UserError: a study was given twice.
    """
    paths = [source.study for source in found]
    for source, path in zip(found, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"each study must be given once, got {source.path} twice: leave one out")
    for depth in itertools.count(1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


# --- Reports of trials after each epoch as one tidy DataFrame: one row per epoch and trial ----------------------------


def history(path: Paths) -> pd.DataFrame:
    """Read what the trials of a study, running or finished, reported after each epoch, from Ray's result files.

    A trial that continued from the checkpoint of an interrupted one gets its earlier epochs from that trial, which also
    keeps its own rows. Of an epoch that was reported more than once, the last report counts.

    Args:
        path: the folder that a search wrote, or the folder of a Ray experiment whose trials are
            `trainables.trial.Trial`; or several of these.

    Returns:
        One row per trial and epoch, sorted by both: ``trial``, ``role``, the columns of `trainables.metrics.ROW`; for
        several paths, with a first column ``study`` as in `analysis.load`. Counts are sums since the run's start.
        ``df.attrs``: ``columns`` (units and meanings) and, of one path, ``quality`` (the metric).

    Raises:
        UserError: there is no study and no Ray experiment of `trainables.trial.Trial`; files hold no epochs.
    """
    found = sources(path)
    frames = [_history(source) for source in found]
    return frames[0] if len(found) == 1 else side_by_side(distinct_names(found), frames)


def _history(source: Source) -> pd.DataFrame:
    layout, roles = Layout(source.path), {}
    if source.kind == "ray":
        trials = read_experiment(source.path)
    elif source.kind == "study":
        trials = [trial for run in sorted(layout.ray.glob("run-*")) for trial in read_experiment(run)]
        try:
            roles = {record["trial"]: record["role"] for record in read_journal(layout.journal)}
        except UserError as error:
            warnings.warn(f"roles are told by the trials' methods alone: {error}", stacklevel=3)
    else:
        raise UserError(
            f"epochs are read from the folder of a study or of a Ray experiment, got the file {source.path}"
        )
    if not roles:
        roles = {trial.number: role for trial, (role, _) in zip(trials, _roles_by_method(trials), strict=True)}
    quality = _quality_of_configs(trial.config for trial in trials)
    rows = [
        {"trial": number, "role": roles.get(number), **named_row(row, quality)}
        for number, epochs in sorted(_continued(trials).items())
        for row in epochs.values()
    ]
    dtypes = {"trial": "int64", "role": "string", **row_dtypes(quality, further_names(rows, quality))}
    frame = described(typed(pd.DataFrame(rows, dtype="object"), dtypes))
    frame.attrs["quality"] = quality.all_fields()
    return frame


def _continued(trials: list[RayTrial]) -> dict[int, dict[int, dict[str, Any]]]:
    """Return rows by trial and epoch, including those of the trial that each one continued; earlier experiments first.

    The continued trial has a lower number. It is found by the number in its folder's name, as the study may have been
    moved since.
    """
    rows: dict[int, dict[int, dict[str, Any]]] = {}
    continues: dict[int, int] = {}
    for trial in trials:
        rows.setdefault(trial.number, {}).update(trial.rows)
        source = Path(trial.resume_from or "").parent.name.rpartition("-")[2]
        if source.isdigit() and int(source) < trial.number:
            continues[trial.number] = int(source)
    for number in sorted(rows):  # ascending, so that the continued trial's rows are complete
        own, before = rows[number], rows.get(continues.get(number, -1), {})
        first = min(own, default=0)
        rows[number] = {**{epoch: row for epoch, row in before.items() if epoch < first}, **dict(sorted(own.items()))}
    return rows


# --- Reader of a Ray Tune experiment on disk: one folder per trial, with its config and one JSON line per reported row
# The files are Ray's (``ray.air.constants``): ``params.json``, ``result.json``, ``error.txt``. Does not need Ray.

#: Name of the folder of a trial that a search of `tune_cac` wrote.
_OUR_NAME = re.compile(r"trial-(\d+)")
_DTYPES = {metric.name: metric.dtype for metric in ROW}


@dataclass(frozen=True, kw_only=True)
class RayTrial:
    """One trial of a Ray experiment."""

    number: int
    """Number of the Optuna trial where a search of `tune_cac` named the folders, else by the order of their names."""
    status: str
    """Status as in `analysis.load`; ``running`` also for a trial that was killed without an error."""
    error: str | None
    """Last line of its error message, where it failed."""
    config: dict[str, Any]
    """Fields of `TrialConfig` in plain types; with defaults filled in where the config is valid."""
    resume_from: str | None
    """Checkpoint that it continued from."""
    rows: dict[int, dict[str, Any]]
    """Its rows by epoch, ascending; the last row of an epoch that was reported more than once."""


def is_experiment(folder: Path) -> bool:
    """Return whether Ray Tune wrote an experiment to this folder."""
    patterns = ("experiment_state-*.json", "*/result.json", "*/params.json")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def read_experiment(folder: Path) -> list[RayTrial]:
    """Return the trials of an experiment that have begun, sorted by number.

    A trial that failed before its first row may have only an ``error.txt``; its config is then not known.

    Raises:
        UserError: the trials are not `trainables.trial.Trial`.
    """
    names = ("params.json", "result.json", "error.txt")
    folders = sorted({path.parent for name in names for path in folder.glob(f"*/{name}")})
    ours = [int(found[1]) for path in folders if (found := _OUR_NAME.fullmatch(path.name))]
    numbered = len(ours) == len(folders)
    lines = [_read_lines(path / "result.json") for path in folders]
    params = [_params(path, rows) for path, rows in zip(folders, lines, strict=True)]
    fields = set(field_names())
    named = [given.get("config", given) for given in params if given]
    if not all(isinstance(config, Mapping) and set(config) <= fields for config in named):
        raise UserError(
            f"a Ray experiment must be of trainables.trial.Trial, the trials of {folder} are others: read them with "
            "ray.tune.ExperimentAnalysis"
        )
    numbers = ours if numbered else range(len(folders))
    trials = []
    for number, path, given, reported in zip(numbers, folders, params, lines, strict=True):
        config, rows, error = _config(given), _rows_by_epoch(reported), _error(path)
        status = "running" if error is None else "failed"
        if reported and reported[-1].get("done"):
            status = "completed" if max(rows, default=0) >= config.get("epochs", 0) else "pruned"
        trials.append(
            RayTrial(
                number=number,
                status=status,
                error=error if status == "failed" else None,
                config=config,
                resume_from=given.get("resume_from"),
                rows=rows,
            )
        )
    return sorted(trials, key=lambda trial: trial.number)


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


def _rows_by_epoch(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the keys of a row (`trainables.metrics`) by epoch, ascending; the last row of an epoch counts."""
    rows = {}
    for line in lines:
        if isinstance(epoch := line.get("epoch"), int):
            now = current_row(line)
            rows[epoch] = {name: _value(name, now[name]) for name in _DTYPES if name in now}
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


# --- Studies, Ray experiments, journals and Parquet files as one tidy DataFrame ---------------------------------------

#: Columns that every Parquet file of trials must have.
_NEEDED = ("trial", "status")


def load(path: Paths) -> pd.DataFrame:
    """Read the trials of one or several studies, running or finished.

    Args:
        path: the folder that a search wrote (of which the Parquet file is read unless the journal is newer), the folder
            of a Ray experiment of `trainables.trial.Trial`, the journal of a search, a Parquet file of trials, or
            several of these.

    Returns:
        One row per trial, by number: the columns of `analysis.io.dtypes.IDENTITY`, of `trainables.metrics` and the
        fields of `TrialConfig`, all of them whatever the study's version; their units, directions and meanings are in
        ``df.attrs["columns"]``. For several paths, all rows, with their study's name in a first column ``study``; each
        trial is compared with the baseline of its own study.

        A Ray experiment has no roles: a trial without a method is the baseline, or a control if it is shorter than
        another trial without a method of its workload. A trial is pruned where Ray ended it before its last epoch, and
        running where Ray has not ended it.

    Raises:
        UserError: nothing can be read.

    Warns:
        UserWarning: part of the data is damaged; the rest is read.
    """
    found = sources(path)
    frames = [_load_one(source) for source in found]
    return frames[0] if len(found) == 1 else side_by_side(distinct_names(found), frames)


def _load_one(source: Source) -> pd.DataFrame:
    if source.kind == "parquet":
        return _read_parquet_or_journal(source.path, Layout(source.path.parent).journal)
    if source.kind == "journal":
        return _of_journal(source.path)
    if source.kind == "ray":
        return to_frame(_records_of_experiment(read_experiment(source.path)))
    layout = Layout(source.path)
    if layout.info.exists():
        layout.read_info()  # raises where this version cannot read the study
    table, journal = layout.trials, layout.journal
    if table.exists() and not (journal.exists() and journal.stat().st_mtime_ns > table.stat().st_mtime_ns):
        return _read_parquet_or_journal(table, journal)
    return _of_journal(journal)


def _of_journal(path: Path) -> pd.DataFrame:
    study = read_study(path)
    configs = [trial.user_attrs.get("config") for trial in study.trials if trial.values or trial.user_attrs]
    if configs and not any(isinstance(config, dict) for config in configs):
        raise UserError(
            f"a journal must be of a search of tune_cac, the study {study.name} of {path} is of another program: read "
            "it with optuna.load_study"
        )
    return to_frame(_records(study))


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
    return [
        {
            **{name: trial.user_attrs.get(name) for name in IDENTITY},
            "trial": trial.number,
            "role": trial.user_attrs.get("role", "search"),
            "status": _status(trial),
            "row": current_row(trial.user_attrs.get("row") or _so_far(trial.user_attrs.get("row_so_far") or {})),
            "config": trial.user_attrs.get("config", {}),
        }
        for trial in study.trials
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


def _so_far(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the FLOPs until a trial without a result failed or was interrupted."""
    return {name: row[name] for name in ("search_flops", "dense_flops") if row.get(name) is not None}


def _records_of_experiment(trials: list[RayTrial]) -> list[dict[str, Any]]:
    """Return records in the form of `read_journal`."""
    records = []
    for trial, (role, control) in zip(trials, _roles_by_method(trials), strict=True):
        row = trial.rows[max(trial.rows)] if trial.rows else {}
        row = row if trial.status in ("completed", "pruned") else _so_far(row)
        named = {"trial": trial.number, "role": role, "status": trial.status, "error": trial.error, "control": control}
        records.append({**named, "row": row, "config": trial.config})
    return records


def _roles_by_method(trials: list[RayTrial]) -> list[tuple[str, str | None]]:
    """Infer role and control of each trial of a Ray experiment from its method and length; Ray does not store them."""
    dense = [trial.config for trial in trials if trial.config.get("method") == "none"]
    roles: list[tuple[str, str | None]] = []
    for config in (trial.config for trial in trials):
        if config not in dense:
            roles.append(("search", None))
        elif config["epochs"] == max(other["epochs"] for other in dense if other["workload"] == config["workload"]):
            roles.append(("baseline", None))
        else:
            roles.append(("control", SHORTER))
    return roles


def to_frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Convert records of `read_journal` to the DataFrame that `load` returns."""
    rows = []
    quality = _quality_of_configs(record["config"] for record in records)
    results = [named_row(record["row"], quality) for record in records]
    for record, result in zip(records, results, strict=True):
        config = {k: json.dumps(v) if isinstance(v, list) else v for k, v in record["config"].items()}
        rows.append({**{k: record.get(k) for k in IDENTITY}, **result, **config})
    dtypes = trial_dtypes(quality, further_names(results, quality))
    return described(_with_relative(typed(pd.DataFrame(rows, dtype="object"), dtypes)))


def _quality_of_configs(configs: Iterable[Mapping[str, Any]]) -> Quality:
    """Return the metric of the trials of one study from their configs, which may be damaged or empty."""
    return quality_in(next((config for config in configs if config.get("metric")), {}))


def _with_relative(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with the columns relative to the baseline, placed after `compute_saved`."""
    frame = relative_to_baseline(frame)
    relative = relative_names(quality_of(frame))
    ordered = [name for name in frame.columns if name not in relative]
    after = ordered.index("compute_saved") + 1
    return frame[[*ordered[:after], *relative, *ordered[after:]]]
