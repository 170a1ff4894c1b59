"""The Python of a job: Ray runs its command by a login shell, whose profile may put another one first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tune_cac.cli.submit import entrypoint


def python_in(folder: Path) -> Path:
    """A program in a folder that says which one it is and what it was asked."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho {folder.name} "$@"\n')
    program.chmod(0o755)
    return program.parent


@pytest.mark.parametrize(("activated", "wanted"), [(True, "environment"), (False, "profile")])
def test_a_job_runs_the_python_of_the_environment_that_started_ray(
    activated: bool, wanted: str, tmp_path: Path
) -> None:
    started_in, profile = python_in(tmp_path / "an environment"), python_in(tmp_path / "profile")
    (tmp_path / ".bash_profile").write_text(f'export PATH="{profile}:$PATH"\n')
    environment = {"HOME": str(tmp_path), "PATH": f"{started_in}:/usr/bin:/bin"}
    if activated:
        environment["VIRTUAL_ENV"] = str(started_in.parent)
    command = entrypoint(["search", "--name", "a study"], home_results=False)
    done = subprocess.run(["bash", "-lc", command], env=environment, capture_output=True, text=True, check=True)
    assert wanted in done.stdout.split(" -m ")[0]
    assert done.stdout.endswith("-m tune_cac search --name a study\n")
