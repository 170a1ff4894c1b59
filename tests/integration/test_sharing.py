"""Searches that share training, on real Ray and a real journal: equal results, fewer FLOPs, no harm by accidents."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from commands_run import run_here
from one_seed import one_seed
from runs import assert_equals_alone, comparable

import analysis
from analysis.io.studies import read_journal
from analysis.io.study_files import Layout
from analysis.presentation.summary_text import config_of
from trainables.config import field_names
from trainables.errors import UserError
from trainables.metrics import ROW_KEYS
from trainables.stage_tree.store import StageStore, roots

pytestmark = pytest.mark.slow

EPOCHS = 6
# By a sampler of Optuna, for what a training costs decides which outcome is trained next.
SEARCH = (
    "search", "--trials", "6", "--epochs", str(EPOCHS), "--concurrency", "1", "--no-controls", "--sampler", "tpe",
)  # fmt: skip


@pytest.fixture(scope="module")
def both(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One search twice, with and without sharing."""
    folder = tmp_path_factory.mktemp("both")
    for name, flags in (("shared", ("--checkpoint-budget", "60MB")), ("alone", ("--no-sharing",))):
        done = run_here(folder, *SEARCH, "--name", name, *flags)
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.txt").write_text(done.stdout + done.stderr)
    return folder


def test_both_modes_are_equal_row_by_row(both: Path) -> None:
    shared, alone = (analysis.load(both / "results" / name) for name in ("shared", "alone"))
    pd.testing.assert_frame_equal(comparable(shared), comparable(alone))
    assert (shared["CAC_VAR_START_THR"].nunique()) > 3  # not one and the same trial


def test_the_search_costs_less_and_says_so(both: Path) -> None:
    shared, alone = (analysis.load(both / "results" / name) for name in ("shared", "alone"))
    assert (alone["search_flops"] == alone["executed_flops"]).all()
    assert (shared["search_flops"] <= shared["executed_flops"]).all()
    spent = shared["search_flops"].sum() / shared["dense_flops"].iloc[0]
    assert shared["search_flops"].sum() < 0.7 * alone["search_flops"].sum()
    assert f"{spent:.1f} full trainings for 6 trials" in (both / "shared.txt").read_text()


def test_replay_predicts_what_was_trained(both: Path) -> None:
    """Of trials in the tree replay knows everything, to the bit."""
    study = both / "results" / "shared"
    trials = analysis.load(study)
    acting = trials[trials["method"] == "gradskip"]
    found = analysis.replay(analysis.load_trace(study), [config_of(row) for _, row in acting.iterrows()])
    assert found["exact"].all()
    assert found["compute_saved"].tolist() == acting["compute_saved"].tolist()
    assert found["accuracy"].tolist() == acting["accuracy"].tolist()
    assert found["stop_events"].tolist() == acting["stop_events"].tolist()


def test_an_ended_study_keeps_a_hundredth_of_its_checkpoints(both: Path) -> None:
    kept = [file for file in (both / "results" / "shared" / "tree" / "checkpoints").rglob("*") if file.is_file()]
    assert kept
    assert sum(file.stat().st_size for file in kept) <= 600_000


def trial_processes(parent: int) -> Iterator[int]:
    """Processes in which Ray runs trials, below a process."""
    below = {parent}
    status = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                status[int(folder.name)] = (int(fields[1]), (folder / "cmdline").read_text())
            except OSError:
                continue
    grown = True
    while grown:
        new = {pid for pid, (above, _) in status.items() if above in below} - below
        below |= new
        grown = bool(new)
    return (
        pid for pid in below if pid in status and status[pid][1].startswith(("ray::ResourceTrainable", "ray::Trial"))
    )


def started(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """A command of ours in a folder."""
    command = [sys.executable, "-m", "tune_cac", *one_seed(arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_tree_of_a_study_describes_its_run(both: Path) -> None:
    tree = Layout(both / "results" / "shared").tree
    (root,) = roots(tree)
    store = StageStore(tree, root)
    described = store.read("root.json")
    assert (described["workload"], described["epochs"], described["total_steps"]) == ("digits", EPOCHS, 10 * EPOCHS)
    assert len(described["layer_names"]) == len(described["trains"]) == 20
    first = store.first()
    first.refresh()
    assert first.known_until == 10 * EPOCHS
    assert first.rows[10 * EPOCHS]["quality"] == analysis.load(both / "results" / "shared").loc[0, "accuracy"]
    assert set(ROW_KEYS) > set(first.rows[10 * EPOCHS])
    assert {"search_flops", *field_names()} & set(first.rows[10 * EPOCHS]) == set()


@pytest.mark.thorough
def test_killed_workers_are_waited_for_by_nobody_and_the_study_is_whole(tmp_path: Path) -> None:
    """SIGKILL of the baseline's worker, then of another trial's: each is begun again, each has its own result."""
    arguments = ["search", "--trials", "5", "--epochs", "12", "--name", "s", "--concurrency", "2", "--no-controls"]
    process = started(tmp_path, arguments)
    study = tmp_path / "results" / "s"
    deadline = time.monotonic() + 240

    def at_work() -> list[int]:
        """Workers that have loaded a trial; before, a process has another name."""
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
        return list(trial_processes(process.pid))

    def running() -> int:
        with contextlib.suppress(UserError, FileNotFoundError):  # the journal is there before the study is in it
            return sum(record["status"] == "running" for record in read_journal(Layout(study).journal))
        return 0

    while not (workers := at_work()) and time.monotonic() < deadline:
        pass
    os.kill(workers[0], signal.SIGKILL)
    while (running() < 2 or not (workers := at_work())) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # both are at work; what is known of them before training takes milliseconds
    while not (workers := at_work()) and time.monotonic() < deadline:
        pass
    os.kill(max(workers), signal.SIGKILL)
    said, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "trial 0 failed and is begun again: its worker died (" in err
    assert err.count("its worker died (") == 2
    assert ": saves " in said or "No setting tried saves" in said
    trials = analysis.load(study)
    assert sorted(trials["status"]) == ["completed"] * 5 + ["interrupted"] * 2
    assert trials["accuracy_drop"].notna().sum() == 5
    for _, row in trials[trials["status"] == "completed"].iterrows():
        assert_equals_alone(row)
