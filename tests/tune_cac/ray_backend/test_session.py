"""Start of Ray on this machine: one cluster at a time, while a process of it stands still, and interrupted."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from tune_cac.ray_backend.session import RayNotStarted, ray_session, starting_alone


def is_gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own; the limit only ends a hanging test."""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


#: Stops Ray's control process as soon as there is one, so Ray waits for it.
STOPPED = """
import os, signal, sys, threading, time, psutil
import tune_cac.ray_backend.session as session
session._START_S = 6.0
def stop():
    while True:
        for child in psutil.Process().children(recursive=True):
            if "gcs_server" in child.name():
                os.kill(child.pid, signal.SIGSTOP)
                return print(child.pid, flush=True)
        time.sleep(0.01)
threading.Thread(target=stop, daemon=True).start()
from tune_cac.__main__ import run
sys.argv = ["tune_cac", "search", "--trials", "1", "--epochs", "1", "--name", "s", "--no-controls"]
run()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_start_that_hangs_ends_in_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    done = run(STOPPED, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Ray did not start in time: a process of it was stopped or killed meanwhile" in done.stderr
    assert "Traceback" not in done.stderr
    process = int(done.stdout.split()[0])
    deadline = time.monotonic() + 60  # it was killed, and is gone in a moment
    while not is_gone(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "message",
    [
        "The current node timed out during startup. This could happen because some of the raylet failed",
        "Timed out waiting for file gcs_server_port_",
    ],
)
def test_a_start_that_ray_itself_gives_up_is_one_line(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """With a stopped process Ray does so after 30 s, which no setting changes; what it raises then is raised here."""

    def init(**_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RayNotStarted, match="Ray did not start in time: a process"), ray_session(cpus=1):
        pass


#: Interrupts a start of Ray, and starts it again at once.
INTERRUPTED = """
import _thread, threading, time, psutil, ray
from tune_cac.ray_backend.session import ray_session
threading.Timer(1.0, _thread.interrupt_main).start()
try:
    with ray_session(cpus=1):
        pass
except KeyboardInterrupt:
    print("interrupted", ray.is_initialized())
with ray_session(cpus=1):
    print(ray.get(ray.remote(lambda: 7).remote()))
print([child.name() for child in psutil.Process().children(recursive=True) if child.status() != "zombie"])
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_ray_and_the_next_search_has_one_of_its_own(tmp_path: Path) -> None:
    done = run(INTERRUPTED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted False", "7", "[]"]


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


@pytest.mark.thorough
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
    with starting_alone(), starting_alone(most_s=0.2):
        pass


def test_a_lock_that_cannot_be_opened_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with starting_alone():
        pass
