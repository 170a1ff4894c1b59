"""A search that shares training, on real Ray and a real journal: killed workers do no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_seed import one_seed
from runs import assert_equals_alone

import analysis
from analysis.io.studies import read_journal
from analysis.io.study_files import Layout
from trainables.errors import UserError

pytestmark = pytest.mark.slow


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
