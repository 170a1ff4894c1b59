"""Studies that Optuna keeps in a real PostgreSQL."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from commands_run import Run
from postgresql import PASSWORD
from postgresql import postgresql as postgresql
from runs import assert_equals_alone

import analysis
from tune_cac.study.database import open_database

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SEARCH = ("search", "--trials", "3", "--epochs", "4", "--no-controls", "--name", "s", "--concurrency", "1")


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)


@pytest.mark.thorough
def test_a_killed_search_goes_on_from_the_database_alone(
    postgresql: str, tune_cac_command: Run, tmp_path: Path
) -> None:
    here = tmp_path / "results" / "s"
    storage = open_database(postgresql)  # here, for two processes cannot make its tables at once
    process = subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *SEARCH, "--study-storage", postgresql], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=(tmp_path / 'err').open('w'), start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240  # only ends a hanging test
        while len(finished := _rows(storage)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "err").read_text()
    finally:
        process.kill()
        process.wait()
    shutil.rmtree(tmp_path / "results")
    done = tune_cac_command("search", "--resume", "s", "--study-storage", postgresql)
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stderr
    trials = analysis.load(here)
    assert (trials["status"] == "completed").sum() == 3
    assert finished.items() <= dict(zip(trials["trial"], trials["accuracy"], strict=True)).items()
    for _, row in trials[trials["status"] == "completed"].iterrows():
        assert_equals_alone(row)
    # The journal is the database's study, trial by trial.
    there = optuna.load_study(study_name="s", storage=storage).get_trials()
    assert not [trial for trial in there if trial.state == optuna.trial.TrialState.RUNNING]
    assert [t.number for t in there] == trials["trial"].tolist()
    again = tune_cac_command(*SEARCH[:1], "--trials", "1", *SEARCH[3:], "--study-storage", postgresql)
    assert again.returncode == 0, again.stderr
    assert (analysis.load(here)["status"] == "completed").sum() == 4
    assert not [file for file in here.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()]
    other = tune_cac_command(*SEARCH)
    assert other.returncode == 2
    assert "holds a study that Optuna keeps in postgresql://cac@127.0.0.1" in other.stderr


def _rows(storage: optuna.storages.BaseStorage) -> dict[int, float]:
    try:
        trials = optuna.load_study(study_name="s", storage=storage).get_trials()
    except KeyError:
        return {}
    return {trial.number: trial.user_attrs["row"]["accuracy"] for trial in trials if "row" in trial.user_attrs}


def test_a_database_that_cannot_be_used_is_one_line(
    postgresql: str, tune_cac_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna.create_study(study_name="foreign", storage=open_database(postgresql))
    for url, message in (
        ("sqlite:///x.db", "--study-storage must be postgresql://USER@HOST:PORT/DATABASE, got sqlite:///x.db"),
        (
            postgresql.replace("cac@", "cac:secret@"),
            "--study-storage must have no password in it, got one for 127.0.0.1",
        ),
        (
            "postgresql://cac@127.0.0.1:1/x",
            "--study-storage must be a database that can be opened, got postgresql://cac",
        ),
    ):
        done = tune_cac_command(*SEARCH, "--study-storage", url)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert message in done.stderr
        assert "secret" not in done.stderr
    done = tune_cac_command("search", "--name", "foreign", "--study-storage", postgresql)
    assert done.returncode == 2
    assert "holds a study foreign that no search wrote" in done.stderr
    monkeypatch.setenv("PGPASSWORD", "wrong")
    done = tune_cac_command(*SEARCH, "--study-storage", postgresql)
    assert done.returncode == 2
    assert "password authentication failed" in done.stderr
