"""Commands: the type of the fixture that runs them as a user does, and a quicker way for those that search."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

from tune_cac.cli import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_here(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder, in this process: with a Ray that is there (`one_ray`) it need not start one."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
