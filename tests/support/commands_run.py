"""Commands: the type of the fixture that runs them as a user does, and a quicker way for those that search."""

from __future__ import annotations

import contextlib
import io
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

import analysis
from tune_cac.cli.main import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_here(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder, in this process: with a Ray that is there (`one_ray`) it need not start one."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def wait_for_trials(study: Path, count: int, process: subprocess.Popen[str]) -> pd.DataFrame:
    """Wait until so many trials have ended; a bound on time only ends a hanging test."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        try:
            trials = analysis.load(study)
        except ValueError:
            trials = pd.DataFrame({"status": []})
        if (trials["status"] == "completed").sum() >= count:
            return trials
        time.sleep(0.2)
    raise AssertionError("the search did not get on")
