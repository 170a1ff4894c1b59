"""Ray's start: one cluster of a machine at a time."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tune_cac.ray_backend.session import starting_alone

#: Says that it has begun to start, and starts until its input ends.
STARTS = """
import sys
from tune_cac.ray_backend.session import starting_alone
print("there", flush=True)
with starting_alone():
    print("begun", flush=True)
    sys.stdin.read()
"""


def _starts(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_start_one_after_the_other(tmp_path: Path) -> None:
    with _starts(tmp_path) as one, _starts(tmp_path) as other:
        outputs = [process.stdout for process in (one, other)]
        for output in outputs:
            assert output is not None
            assert output.readline() == b"there\n"
        ready, _, _ = select.select(outputs, [], [], 60)
        first = ready[0]
        assert first is not None
        assert first.readline() == b"begun\n"
        holder, waiter = (one, other) if first is one.stdout else (other, one)
        assert select.select([waiter.stdout], [], [], 2)[0] == []
        holder.communicate()  # ends its input
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == b"begun\n"
        waiter.communicate()


def test_who_waits_too_long_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with starting_alone():
        begun = time.monotonic()
        with starting_alone(most_s=0.3):
            assert time.monotonic() - begun >= 0.3


def test_a_lock_that_cannot_be_opened_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with starting_alone():
        pass
