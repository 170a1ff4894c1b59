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
from runs import assert_equals_alone

import analysis
from tune_cac.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SEARCH = ("search", "--trials", "2", "--epochs", "3", "--no-controls", "--concurrency", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with job_cluster(tmp_path_factory.mktemp("home")) as environment:
        yield environment


def tune_cac(folder: Path, cluster: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster, "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "tune_cac", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def job_in(said: str) -> str:
    return re.findall(r"^job (\S+): ", said, re.MULTILINE)[0]


def test_a_search_is_submitted_followed_fetched_and_resumed(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("secret.txt\ndata/\n")
    (tmp_path / "secret.txt").write_text("not to be shipped")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_bytes(bytes(10**6))
    (tmp_path / "own.py").write_text("def factory():\n    raise ValueError('shipped')\n")
    done = tune_cac(tmp_path, cluster, "submit", "--", *SEARCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shipping 2 files, 0.0 MB" in done.stderr
    assert "[1/2] trial 0: accuracy" in done.stdout  # the search's own progress
    assert "Search cost:" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    job = job_in(done.stderr)
    listed = tune_cac(tmp_path, cluster, "jobs", "list")
    assert job in listed.stdout
    assert "SUCCEEDED" in listed.stdout
    status = tune_cac(tmp_path, cluster, "jobs", "status", job)
    assert (status.returncode, status.stdout.split(":")[0]) == (0, "SUCCEEDED, exit code 0")
    fetched = tune_cac(tmp_path, cluster, "jobs", "fetch", job)
    assert (fetched.returncode, fetched.stdout.strip()) == (0, f"results/{job}"), fetched.stderr
    trials = analysis.load(tmp_path / "results" / job)
    assert trials["status"].tolist() == ["completed"] * 2
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    info = json.loads((tmp_path / "results" / job / "study.json").read_text())
    (tmp_path / "results" / job / "study.json").write_text(json.dumps({**info, "trials": 3}))
    local = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    resumed = subprocess.run(
        [sys.executable, "-m", "tune_cac", "search", "--resume", job], cwd=tmp_path, env=local, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert analysis.load(tmp_path / "results" / job)["status"].tolist() == ["completed"] * 3
    # What the command raises is its exit code: Ray says FAILED, and the job's log why.
    failed = tune_cac(tmp_path, cluster, "submit", "--", "trial", "--workload", "own:factory", "--epochs", "1")
    assert failed.returncode not in (0, 130)
    assert "shipped" in failed.stdout
    again = tune_cac(tmp_path, cluster, "jobs", "fetch", job)
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert "exists already: move it away, or give another folder by --into" in again.stderr


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
    while "on script" not in (log := tune_cac(tmp_path, cluster, "jobs", "logs", job).stdout):
        assert time.monotonic() < deadline, log
    stopped = tune_cac(tmp_path, cluster, "jobs", "stop", job)
    assert stopped.returncode == 0
    followed = tune_cac(tmp_path, cluster, "jobs", "logs", job, "--follow")
    assert followed.returncode == 130
    assert "STOPPED" in tune_cac(tmp_path, cluster, "jobs", "status", job).stdout


def test_what_cannot_be_submitted_is_one_line(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(3 * 10**6))
    for environment, arguments, message in (
        ({}, ["submit"], "submit needs a command after --"),
        ({}, ["submit", "--", "search", "--space", "auto_treshold"], "unknown space 'auto_treshold': did you mean"),
        ({}, ["submit", "--most-mb", "2", "--", *SEARCH], "at most 2 MB to ship, got 3 MB in 1 files (big 3 MB)"),
        ({}, ["submit", "--", *SEARCH, "--results", "here"], "--results of a job must be an absolute folder"),
        ({}, ["submit", "--env", "RAY_AUTH_TOKEN", "--", *SEARCH], "--env must not pass RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "d" * 64}, ["jobs", "list"], "asks for a token, and the token given is not its own"),
        ({"RAY_AUTH_MODE": "disabled"}, ["jobs", "list"], "asks for a token, and none was given"),
        ({}, ["jobs", "status", "nothing"], "no job 'nothing' on this cluster: jobs there: tune-cac-"),
    ):
        done = tune_cac(tmp_path, {**cluster, **environment}, *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert message in done.stderr
        assert "d" * 64 not in done.stderr


def test_an_address_where_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "list", "--address", "http://127.0.0.1:1"]) == 2
    assert "--address must be that of a cluster's job server, got http://127.0.0.1:1 (Connection refused)" in (
        capsys.readouterr().err
    )
    assert main(["jobs", "list", "--address", "127.0.0.1:8265"]) == 2
    assert "--address must be that of a cluster's job server, such as http://127.0.0.1:8265" in capsys.readouterr().err
