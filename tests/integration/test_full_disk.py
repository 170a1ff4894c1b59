"""A disk that is full while a search writes its journal: one line, nothing lost, and the search goes on later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import full_disk_search
import pytest
from commands_run import Run
from runs import assert_equals_alone

import analysis

pytestmark = pytest.mark.slow


def test_a_full_disk_ends_the_search_in_one_line_and_loses_nothing(tmp_path: Path, tune_cac_command: Run) -> None:
    arguments = ["search", "--trials", "5", "--epochs", "6", "--no-controls", "--name", "s", "--concurrency", "2"]
    done = subprocess.run(
        [sys.executable, full_disk_search.__file__, "40", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tune_cac: error: results/s cannot be written (No space left on device): what has ended is kept; make room, "
        "then go on with python -m tune_cac search --resume results/s"
    )
    study = tmp_path / "results" / "s"
    assert not (study / "optuna.journal").read_bytes().endswith(b"\n")
    before = analysis.load(study)
    kept = before[before["status"] == "completed"]
    assert len(kept) >= 1
    resumed = tune_cac_command("search", "--resume", "s")
    assert resumed.returncode == 0, resumed.stderr
    after = analysis.load(study)
    ended = after[after["status"] == "completed"]
    assert len(ended) == 5
    same = ended[ended["trial"].isin(kept["trial"])]
    assert same[["trial", "accuracy", "executed_flops"]].equals(kept[["trial", "accuracy", "executed_flops"]])
    for _, row in ended.iterrows():
        assert_equals_alone(row)
