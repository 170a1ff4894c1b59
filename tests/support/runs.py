"""Runs trained to the end, and what of their rows two runs of one configuration must agree in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import pytest

from analysis.presentation.summary_text import config_of
from trainables.config import TrialConfig
from trainables.metrics import named_row
from trainables.script.run import ScriptRun
from trainables.stage_tree.shared_run import SharedRun
from trainables.training.run import TrainingRun

#: Columns that measure this machine and moment.
MEASURED = {"train_time_s", "train_energy_j", "wall_time_s", "peak_memory_bytes", "latency_s"}
#: The same, and what says what the search spent or where it did.
NOT_THE_RUNS = MEASURED | {"search_flops", "stage"}

Row = dict[str, Any]


def rows_to_the_end(run: TrainingRun | ScriptRun) -> list[Row]:
    """The rows of a run, which is closed then."""
    try:
        rows = []
        while not run.finished:
            rows.append(run.train_epoch())
        return rows
    finally:
        run.close()


def without(rows: Iterable[Row], columns: set[str]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


def facts(rows: Iterable[Row]) -> list[Row]:
    """What a trial over the stage tree and the run alone agree in."""
    return without(rows, NOT_THE_RUNS)


def finish(run: TrainingRun | SharedRun) -> list[Row]:
    """What is left of the run; its rows."""
    rows = []
    while not run.finished:
        rows.append(run.train_epoch())
    return rows


def rows_alone(config: TrialConfig) -> list[Row]:
    """Facts of the run without a tree."""
    with TrainingRun(config) as run:
        return facts(finish(run))


def comparable(trials: pd.DataFrame) -> pd.DataFrame:
    """Columns of a loaded study in which searches with and without sharing agree."""
    measured = {*NOT_THE_RUNS, "time_saved", "peak_memory_saved"}
    return trials[[name for name in trials.columns if name not in measured]]


def assert_equals_alone(trial: pd.Series) -> None:
    """A trial of a loaded study ended as its configuration does, trained in this process without Ray."""
    config = config_of(trial)
    last = named_row(rows_alone(config)[-1], config.quality)
    known = {name: None if pd.isna(trial[name]) else trial[name] for name in last}
    if pd.notna(trial["of_epochs"]):  # its savings are those of the full run's budget
        budget = last["dense_flops"] * trial["of_epochs"] / config.epochs
        assert known.pop("compute_saved") == pytest.approx(1 - last["executed_flops"] / budget)
        assert known.pop("backward_saved") >= last["backward_saved"]
        last = {name: value for name, value in last.items() if name in known}
    assert known == last, trial["trial"]
