"""Reports of trials after each epoch as one tidy DataFrame: one row per epoch and trial."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.io.columns import described, further_names, row_dtypes, side_by_side, typed
from analysis.io.layout import Layout
from analysis.io.ray_results import RayTrial, read_experiment
from analysis.io.sources import Source, distinct_names, sources
from analysis.io.studies import quality_of_configs, read_journal, roles_by_method
from trainables.errors import UserError
from trainables.metrics import named_row

_Rows = dict[int, dict[str, Any]]


def history(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Read what the trials of a study, running or finished, reported after each epoch, from Ray's result files.

    A trial that continued from the checkpoint of an interrupted one gets its earlier epochs from that trial, which also
    keeps its own rows. Of an epoch that was reported more than once, the last report counts.

    Args:
        path: the folder that a search wrote, or the folder of a Ray experiment whose trials are
            `trainables.trial.Trial`; or several of these.

    Returns:
        One row per trial and epoch, sorted by both: ``trial``, ``role``, the columns of `trainables.metrics.ROW`; for
        several paths, with a first column ``study`` as in `analysis.load`. Counts are sums since the run's start. Units
        and meanings of the columns are in ``df.attrs["columns"]``, of one path the metric's name, direction and unit in
        ``df.attrs["quality"]``. Rows that Ray is just writing are left out.

    Raises:
        UserError: there is no study and no Ray experiment, its trials are not `trainables.trial.Trial`, or a file was
            given, which holds no epochs.
    """
    found = sources(path)
    for source in found:
        if source.kind not in ("study", "ray"):
            raise UserError(
                f"epochs are read from the folder of a study or of a Ray experiment, got the file {source.path}"
            )
    if len(found) == 1:
        return _history(found[0])
    return side_by_side(distinct_names(found), [_history(source) for source in found])


def _history(source: Source) -> pd.DataFrame:
    if source.kind == "ray":
        trials = read_experiment(source.path)
        if not all(trial.ours for trial in trials):
            raise UserError(
                f"epochs are read of trials of trainables.trial.Trial, those of {source.path} are others: "
                "read their last rows with analysis.load, or all rows with ray.tune.ExperimentAnalysis"
            )
        roles = {trial.number: role for trial, (role, _) in zip(trials, roles_by_method(trials), strict=True)}
    else:
        layout = Layout(source.path)
        trials = [trial for run in sorted(layout.ray.glob("run-*")) for trial in read_experiment(run)]
        roles = _roles(layout, trials)
    quality = quality_of_configs(trial.config for trial in trials)
    rows = [
        {"trial": number, "role": roles.get(number), **named_row(row, quality)}
        for number, epochs in sorted(_continued(trials).items())
        for row in epochs.values()
    ]
    dtypes = {"trial": "int64", "role": "string", **row_dtypes(quality, further_names(rows, quality))}
    frame = described(typed(pd.DataFrame(rows, dtype="object"), dtypes))
    frame.attrs["quality"] = quality.all_fields()
    return frame


def _roles(layout: Layout, trials: list[RayTrial]) -> dict[int, str]:
    try:
        return {record["trial"]: record["role"] for record in read_journal(layout.journal)}
    except UserError as error:
        warnings.warn(f"roles are told by the trials' methods alone: {error}", stacklevel=2)
        return {trial.number: role for trial, (role, _) in zip(trials, roles_by_method(trials), strict=True)}


def _continued(trials: list[RayTrial]) -> dict[int, _Rows]:
    """Return rows by trial and epoch, including those of the trial that each one continued; earlier experiments first.

    The continued trial has a lower number. It is found by the number in its folder's name, as the study may have been
    moved since.
    """
    rows: dict[int, _Rows] = {}
    continues: dict[int, int] = {}
    for trial in trials:
        rows[trial.number] = {**rows.get(trial.number, {}), **trial.rows}
        _, _, source = Path(trial.resume_from or "").parent.name.rpartition("-")
        if source.isdigit() and int(source) < trial.number:
            continues[trial.number] = int(source)
    for number in sorted(rows):  # ascending, so that the continued trial's rows are complete
        own = rows[number]
        before = rows.get(continues.get(number, -1), {})
        inherited = {epoch: row for epoch, row in before.items() if epoch < min(own, default=0)}
        rows[number] = dict(sorted({**inherited, **own}.items()))
    return rows
