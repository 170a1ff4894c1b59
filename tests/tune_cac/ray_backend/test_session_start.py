"""Start of Ray on this machine while one of its processes stands still."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from tune_cac.ray_backend.session import RayNotStarted, ray_session


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


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_ray_and_the_next_search_has_one_of_its_own(tmp_path: Path) -> None:
    done = run(INTERRUPTED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted False", "7", "[]"]
