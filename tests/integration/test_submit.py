"""Searches as jobs of a real Ray cluster that asks for a token, through the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_cluster import TOKEN, job_cluster
from one_seed import one_seed
from runs import assert_equals_alone

import analysis
from tune_cac.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SEARCH = ("search", "--trials", "2", "--epochs", "3", "--no-controls", "--concurrency", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with job_cluster(tmp_path_factory.mktemp("home")) as environment:
        yield environment


def run_as(folder: Path, cluster: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def tune_cac(folder: Path, cluster: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_as(folder, cluster, sys.executable, "-m", "tune_cac", *one_seed(arguments))


def ray_job(folder: Path, cluster: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ray's own command, with which jobs are looked at."""
    return run_as(folder, cluster, str(Path(sys.executable).parent / "ray"), "job", *arguments)


def test_a_search_is_submitted_followed_and_resumed_elsewhere(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("secret.txt\ndata/\n")
    (tmp_path / "secret.txt").write_text("not to be shipped")
    for folder in ("data", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "big").write_bytes(bytes(10**6))
    (tmp_path / "own.py").write_text("import os\ndef factory():\n    raise ValueError(sorted(os.listdir()))\n")
    shared = tmp_path / "shared"
    (tmp_path / "work").mkdir()
    done = tune_cac(tmp_path / "work", cluster, "submit", "--", *SEARCH, "--results", str(shared))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/2] trial 0: accuracy" in done.stdout  # the search's own progress
    assert "Search cost:" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    (job,) = re.findall(r"^job (\S+): ", done.stderr, re.MULTILINE)
    assert "succeeded" in ray_job(tmp_path, cluster, "status", job).stdout
    trials = analysis.load(shared / job)
    assert trials["status"].tolist() == ["completed"] * 2
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    info = json.loads((shared / job / "study.json").read_text())
    (shared / job / "study.json").write_text(json.dumps({**info, "trials": 3}))
    local = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    resumed = subprocess.run(
        [sys.executable, "-m", "tune_cac", "search", "--resume", str(shared / job)], cwd=tmp_path, env=local,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert analysis.load(shared / job)["status"].tolist() == ["completed"] * 3
    # What the command raises is its exit code: Ray says FAILED, and the job's log why.
    failed = tune_cac(tmp_path, cluster, "submit", "--", "trial", "--workload", "own:factory", "--epochs", "1")
    assert failed.returncode not in (0, 130)
    assert "['.gitignore', 'own.py', 'shared', 'work']" in failed.stdout


def test_a_search_with_failed_trials_fails_and_a_stopped_one_ends(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, os, sys, time\n"
        "threshold = float(sys.argv[1])\n"
        "time.sleep(600 if os.environ.get('HANG') else 0)\n"
        "if threshold > 0: sys.exit('no good')\n"
        "print(json.dumps({'accuracy': 0.5, 'step': 9, 'compute_saved': 0}))\n"
    )
    script = ("--script", "python train.py {CAC_VAR_START_THR}", "--trials", "2", "--no-controls")
    done = tune_cac(tmp_path, cluster, "submit", "--", "search", *script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 trials failed" in done.stdout
    begun = tune_cac(tmp_path, cluster, "submit", "--no-wait", "--env", "HANG=1", "--", "search", *script)
    assert begun.returncode == 0
    job = begun.stdout.strip()
    deadline = time.monotonic() + 120  # only ends a hanging test
    while "on script" not in (log := ray_job(tmp_path, cluster, "logs", job).stdout):
        assert time.monotonic() < deadline, log
    stopped = ray_job(tmp_path, cluster, "stop", job)
    assert stopped.returncode == 0
    assert "was stopped" in stopped.stdout
    code = f"from tune_cac.ray_backend.job import connect, follow; exit(follow(connect(None), {job!r}, print))"
    assert run_as(tmp_path, cluster, sys.executable, "-c", code).returncode == 130


def test_what_cannot_be_submitted_is_one_line(cluster: dict[str, str], tmp_path: Path) -> None:
    for environment, arguments, message in (
        ({}, ["submit", "--", "search", "--space", "auto_treshold"], "unknown space 'auto_treshold': did you mean"),
        ({"RAY_AUTH_TOKEN": "d" * 64}, ["submit", "--", *SEARCH], "asks for a token, and the token given is not its"),
        ({"RAY_AUTH_MODE": "disabled"}, ["submit", "--", *SEARCH], "asks for a token, and none was given"),
    ):
        done = tune_cac(tmp_path, {**cluster, **environment}, *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert message in done.stderr
        assert "d" * 64 not in done.stderr


def test_an_address_where_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--address", "http://127.0.0.1:1", "--", "search"]) == 2
    assert "job server, such as http://127.0.0.1:8265, got http://127.0.0.1:1 (Failed to connect to Ray at " in (
        capsys.readouterr().err
    )
    assert main(["submit", "--address", "127.0.0.1:8265", "--", "search"]) == 2
    assert "--address must be that of a cluster's job server, such as http://127.0.0.1:8265" in capsys.readouterr().err
