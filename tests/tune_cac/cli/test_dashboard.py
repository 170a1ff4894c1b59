"""optuna-dashboard on a study's journal: what it serves, to whom, and what it refuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from studies import result_row, write_study


@pytest.fixture
def study(tmp_path: Path) -> Path:
    rows = [{"row": result_row()}, {"row": result_row(0.96, 0.3)}]
    return write_study(tmp_path / "s", rows, directions=("minimize", "maximize")).root


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port(study: Path) -> Iterator[int]:
    number = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tune_cac", "dashboard", str(study), "--port", str(number), "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{study}: http://127.0.0.1:{number}/ (Ctrl-C ends it)\n"
        yield number
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_it_serves_the_journal_to_this_machine_alone(port: int) -> None:
    address = f"http://127.0.0.1:{port}/api/studies"
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                studies = json.load(answer)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert "tune_cac" in json.dumps(studies)
    assert studies["study_summaries"][0]["directions"] == ["minimize", "maximize"]  # as a study of a loss has them
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    assert [place for place in listening if int(place.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]


def test_refusals(study: Path, refused: Callable[..., str]) -> None:
    dashboard = ("dashboard", str(study), "--no-browser", "--port")
    assert refused(*dashboard, "0") == "--port must be an integer in [1, 65535], got 0"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert refused(*dashboard, str(number)).startswith(f"port {number} of 127.0.0.1 cannot be used: ")
    (study / "optuna.journal").unlink()
    assert refused(*dashboard, "1").endswith("has no journal yet: its search has not begun")
