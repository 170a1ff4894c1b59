"""A disk that is full while a search writes its journal: one line, nothing lost, and the search goes on later."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import full_disk_search
import pytest
from commands_run import Run
from one_seed import one_seed
from runs import assert_equals_alone

import analysis
from trainables.errors import DiskError, UserError, cannot_write

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_a_full_disk_ends_the_search_in_one_line_and_loses_nothing(tmp_path: Path, tune_cac_command: Run) -> None:
    arguments = ["search", "--trials", "5", "--epochs", "6", "--no-controls", "--name", "s", "--concurrency", "2"]
    arguments += ["--sampler", "tpe", "--seeds", "1"]  # which trains as many as it is told to
    done = subprocess.run(
        [sys.executable, full_disk_search.__file__, "40", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tune_cac: error: results/s cannot be written (No space left on device): finished trials are kept; make room, "
        "then run python -m tune_cac search --resume results/s"
    )
    study = tmp_path / "results" / "s"
    assert not (study / "optuna.journal").read_bytes().endswith(b"\n")
    before = analysis.load(study)
    kept = before[before["status"] == "completed"]
    assert len(kept) >= 1
    resumed = tune_cac_command("search", "--resume", "s")
    assert resumed.returncode == 0, resumed.stderr
    after = analysis.load(study)
    ended = after[after["status"] == "completed"]
    assert len(ended) == 5
    same = ended[ended["trial"].isin(kept["trial"])]
    assert same[["trial", "accuracy", "executed_flops"]].equals(kept[["trial", "accuracy", "executed_flops"]])
    for _, row in ended.iterrows():
        assert_equals_alone(row)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["spaces", "auto_thresholds"], "cannot write what was printed or written: File too large; make room"),
        (["search", "--trials", "2", "--epochs", "2", "--name", "s"], "File too large; make room"),
        (["workloads"], "cannot write what was printed or written: "),
    ],
)
def test_whatever_a_command_writes_a_full_disk_is_one_line_and_its_own_code(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "tune_cac", *one_seed(arguments)], cwd=tmp_path, stdout=out,
            stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)), timeout=200,
        )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert said in done.stderr.splitlines()[-1]


def test_an_asked_file_that_the_disk_refuses_has_its_code_too(tmp_path: Path) -> None:
    for number, kind in ((errno.ENOSPC, DiskError), (errno.EROFS, DiskError), (errno.EACCES, UserError)):
        error = cannot_write("--output x", OSError(number, os.strerror(number)), "choose another file")
        assert type(error) is kind
        assert str(error) == f"cannot write --output x: {os.strerror(number)}; choose another file"
