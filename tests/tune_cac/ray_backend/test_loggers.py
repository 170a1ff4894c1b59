"""Runs of trials in MLflow and W&B, offline, by the real packages, which only this test installs."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
from trainables.errors import UserError
from tune_cac.study.search_options import SearchOptions

ROOT = Path(__file__).parents[3]


def test_what_is_not_there_is_said_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_cac.ray_backend.loggers.find_spec", lambda _: None)
    with pytest.raises(UserError, match="unknown --log 'mlfow': did you mean 'mlflow'"):
        SearchOptions(log=["mlfow"])
    with pytest.raises(UserError, match=r"--log wandb needs its package: pip install 'tune-cac\[wandb\]'"):
        SearchOptions(log=["wandb"])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_trial_is_a_run_of_each(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "--target", packages]
    subprocess.run([*pip, "mlflow-skinny", "wandb"], check=True, timeout=300, capture_output=True)
    search = "search --log mlflow wandb --trials 2 --epochs 4 --seeds 1 --no-controls --name s"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "WANDB"))}
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(packages)])  # ours first
    done = subprocess.run(
        [sys.executable, "-m", "tune_cac", *search.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**environment, "PYTHONPATH": paths.strip(os.pathsep)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = tmp_path / "results" / "s"
    assert len(list((study / "wandb").glob("offline-run-*/*.wandb"))) == 2
    trials = analysis.load(study).set_index("trial")
    with sqlite3.connect(study / "mlflow.db") as database:
        found = database.execute(
            "select name, value from runs join metrics using (run_uuid) "
            "where key = 'accuracy' and step = 4 order by name"
        ).fetchall()
        settings = dict(database.execute("select key, value from params where key like 'CAC_%'").fetchall())
    assert [value for _, value in found] == trials["accuracy"].tolist()
    assert float(settings["CAC_VAR_START_THR"]) == trials["CAC_VAR_START_THR"][1]
