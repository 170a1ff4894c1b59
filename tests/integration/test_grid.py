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

import analysis
from analysis.io.studies import read_journal
from analysis.presentation.ranked_table import ranked_table

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


def test_a_grid_in_parts_is_killed_resumed_and_read_together(tmp_path: Path, one_ray: None) -> None:
    (tmp_path / "grid.yaml").write_text(TEXT)
    search = ["search", "--grid", "grid.yaml", "--epochs", "8", "--name", "g", "--no-controls", "--concurrency", "1"]
    first, second = (tmp_path / "results" / f"g-part{number}of2" for number in (1, 2))
    process = subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *search, "--part", "1/2", "--no-sharing"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    before = wait_for_trials(first, 2, process)
    process.kill()
    _, err = process.communicate(timeout=120)
    assert "g-part1of2: grid on digits, 5 trials of 8 epochs, 1 at a time, part 1/2: 4 of 7 grid points" in err
    done = before[before["status"] == "completed"].set_index("trial")["wall_time_s"]

    resumed = run_here(tmp_path, "search", "--resume", "g-part1of2")
    assert resumed.returncode == 0, resumed.stderr
    assert as_set(completed(first)) == as_set(POINTS[::2])  # none twice
    after = analysis.load(first).set_index("trial")["wall_time_s"]
    assert after[done.index].tolist() == done.tolist()

    other = run_here(tmp_path, *search, "--part", "2/2", "--trials", "2")
    assert other.returncode == 0, other.stderr
    assert completed(second) == POINTS[1:2]
    rest = run_here(tmp_path, *search, "--part", "2/2")  # the same again, without the limit: what is missing
    assert rest.returncode == 0, rest.stderr
    assert completed(second) == POINTS[1::2]
    trials = len(analysis.load(second))
    assert run_here(tmp_path, *search, "--part", "2/2").returncode == 0
    assert len(analysis.load(second)) == trials == 4

    together = analysis.load([first, second])
    assert together.query("status == 'completed'").groupby("study").size().tolist() == [5, 4]
    ranking = analysis.rank(together, allowed_drop=0.005)
    assert ranking["compute_saved"].max() > 0
    named = [cells[-1] for cells in ranked_table(ranking)[1:]]
    assert "START_ITR=0 START_THR=0.98 BRAKING_DISTANCE=20" in named  # without CAC_VAR_SAMPLES, which is excluded
    compared = run_here(tmp_path, "compare", "g-part1of2", "g-part2of2")
    assert compared.returncode == 0, compared.stderr
