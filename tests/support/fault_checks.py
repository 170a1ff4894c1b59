"""What holds after every fault: finished trials are kept, none is left running, no process is left behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from one_seed import one_seed
from studies import study_of

from analysis.io.studies import read_journal
from analysis.io.study_files import Layout
from trainables.errors import UserError

#: Variable by which the processes of a test are found: every process inherits it from the one that started it.
MARK = "TUNE_CAC_TEST_MARK"


def new_mark() -> dict[str, str]:
    """Return a variable that no other test's processes have."""
    return {MARK: secrets.token_hex(8)}


def marked(mark: Mapping[str, str], name: str = "") -> list[int]:
    """Return the living processes with this mark whose command line contains ``name``."""
    wanted, found = f"{MARK}={mark[MARK]}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if wanted in variables and name in command and state not in "ZX":
            found.append(int(folder.name))
    return found


def wait_until(
    happens: Callable[[], Any], what: str, most_s: float = 240.0, process: subprocess.Popen[str] | None = None
) -> Any:
    """Return the first true value; the bound only ends a hanging test, and the process must run meanwhile."""
    ends = time.monotonic() + most_s
    while time.monotonic() < ends:
        if found := happens():
            return found
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {most_s:g} s")


def started(folder: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start a command of tune_cac in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *one_seed(arguments)], cwd=folder, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def records(study: Path) -> list[dict[str, Any]]:
    """Return the trials of a study that may be just beginning. Optuna would create the journal that is not there."""
    with suppress(UserError, FileNotFoundError):  # the journal is there before the study is in it
        return read_journal(Layout(study).journal)
    return []


def running(study: Path) -> list[int]:
    """Return the numbers of the running trials."""
    return [record["trial"] for record in records(study) if record["status"] == "running"]


def finished_rows(study: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of the trials that ended, by number."""
    return {record["trial"]: record["row"] for record in records(study) if record["status"] == "completed"}


def assert_nothing_lost(study: Path, before: Mapping[int, Mapping[str, Any]]) -> None:
    """Assert that trials that had ended are as they were, and that no trial is left running."""
    after = finished_rows(study)
    assert {number: after.get(number) for number in before} == dict(before)
    assert [t.number for t in study_of(study).trials if t.state.name == "RUNNING"] == []


def assert_no_process(mark: Mapping[str, str], most_s: float = 150.0) -> None:
    """Assert that all processes of a test end; Ray's wait up to a minute for a head that was killed with their node."""
    ends = time.monotonic() + most_s
    while (left := marked(mark)) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0")[-300:] for pid in left]
