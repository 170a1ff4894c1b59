"""A grid on real Ray clusters: killed, resumed, in parts, read together. The grid is that of docs/commands.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands_run import run_here, wait_for_trials
from one_seed import one_seed

import analysis
from analysis.io.studies import read_journal
from analysis.presentation.markdown_report import ranked_table

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
TEXT = re.findall(r"```yaml\n(# grid.yaml\n.*?)```", PAGE, re.DOTALL)[0]
AUTO = {"CAC_VAR_START_ITR": 0, "CAC_VAR_SAMPLES": 5}
LINEAR = {"CAC_RULE": "linear", "CAC_RULE_END_ITR": 100}
#: The points of the page's file, written by hand.
POINTS: list[dict[str, Any]] = [
    {**AUTO, "CAC_VAR_START_THR": 0.98},
    {**AUTO, "CAC_VAR_START_THR": 0.98, "CAC_BRAKING_DISTANCE": 20},
    {**AUTO, "CAC_VAR_START_THR": 0.9999},
    {**AUTO, "CAC_VAR_START_THR": 0.9999, "CAC_BRAKING_DISTANCE": 20},
    {**LINEAR, "CAC_RULE_DEPTH": 0.3},
    {**LINEAR, "CAC_RULE_DEPTH": 0.6, "CAC_WHOLE_UNITS": True},
    {**LINEAR, "CAC_RULE_DEPTH": 0.6, "CAC_WHOLE_UNITS": False},
]


def completed(study: Path) -> list[dict[str, Any]]:
    """Settings of the trials that completed, beside the baseline."""
    return [
        {name: value for name, value in record["config"].items() if name.startswith("CAC_")}
        for record in read_journal(study / "optuna.journal")
        if record["status"] == "completed" and record["role"] != "baseline"
    ]


def as_set(points: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(point, sort_keys=True) for point in points)


def test_a_grid_is_killed_and_resumed(tmp_path: Path, one_ray: None) -> None:
    (tmp_path / "grid.yaml").write_text(TEXT)
    search = ["search", "--grid", "grid.yaml", "--epochs", "8", "--name", "g", "--no-controls", "--concurrency", "1"]
    study = tmp_path / "results" / "g"
    process = subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *one_seed(search), "--no-sharing"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    before = wait_for_trials(study, 2, process)
    process.kill()
    _, err = process.communicate(timeout=120)
    assert "g: grid on digits, 8 trials of 8 epochs, 1 at a time, on the CPU (torch sees no GPU), 7 grid points" in err
    done = before[before["status"] == "completed"].set_index("trial")["wall_time_s"]

    resumed = run_here(tmp_path, "search", "--resume", "g")
    assert resumed.returncode == 0, resumed.stderr
    assert as_set(completed(study)) == as_set(POINTS)  # none twice
    after = analysis.load(study).set_index("trial")["wall_time_s"]
    assert after[done.index].tolist() == done.tolist()
    trials = len(analysis.load(study))
    assert run_here(tmp_path, *search).returncode == 0  # the same again: nothing is missing
    assert len(analysis.load(study)) == trials

    ranking = analysis.rank(analysis.load(study), allowed_drop=0.005)
    assert ranking["compute_saved"].max() > 0
    named = [cells[-1] for cells in ranked_table(ranking)[1:]]
    assert "START_ITR=0 START_THR=0.98 BRAKING_DISTANCE=20" in named  # without CAC_VAR_SAMPLES, which is excluded
