"""Searches whose surroundings fail: signals at any moment, readers that leave, clusters that are not there."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import two_nodes as two_nodes_script
from commands_run import Run
from thorough import rest_thorough

import analysis
from tune_cac.cli.main import main

pytestmark = pytest.mark.slow

SEARCH = [
    sys.executable, "-m", "tune_cac", "search", "--seeds", "1", "--trials", "3", "--epochs", "4", "--name", "s",
    "--no-controls",
]  # fmt: skip


def said_first(process: subprocess.Popen[str]) -> None:
    """Wait for the search's first line, which comes before torch and Ray are loaded."""
    assert process.stderr is not None
    assert "3 trials of 200 epochs" in process.stderr.readline()


@pytest.mark.parametrize("delay_s", rest_thorough([2.0, 0.0, 5.0]))
def test_sigterm_ends_a_search_as_ctrl_c_does_whenever_it_comes(delay_s: float, tmp_path: Path) -> None:
    """Before Ray is up, while it starts, while it trains: 130, which before was 143 or 15."""
    arguments = [*SEARCH, "--epochs", "200", "--no-sharing"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said_first(process)
    time.sleep(delay_s)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "nterrupted" in err
    assert not (tmp_path / "results" / "s" / "best.env").exists()  # no trial has ended, so nothing is best
    assert "best.env" not in out


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_an_interrupt_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    """As of `timeout`, a terminal or a batch system, which signal Ray's processes, too."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:  # short, for sockets

        def of_ray() -> list[psutil.Process]:
            return [
                p for p in psutil.process_iter(["cmdline"]) if any(place in part for part in p.info["cmdline"] or ())
            ]

        process = subprocess.Popen(
            [*SEARCH, "--epochs", "200", "--no-sharing"], cwd=tmp_path, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True, start_new_session=True, env={**os.environ, "RAY_TMPDIR": place},
        )  # fmt: skip
        said_first(process)
        deadline = time.monotonic() + 120
        while len(of_ray()) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(4)  # a trial trains
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        assert "nterrupted" in err
        assert "does not answer" not in err
        while of_ray() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert of_ray() == []


@pytest.mark.thorough
def test_sigterm_in_the_moment_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Ray forks while it starts. Its own handler exits right there: that was dropped, and `logging` stayed locked."""
    hook = (
        "import os, signal, sys; ours, sent = os.getpid(), []; os.register_at_fork(after_in_parent=lambda: "
        "None if sent or os.getpid() != ours else (sent.append(1), os.kill(ours, signal.SIGTERM)))\n"
        f"sys.argv = {['tune_cac', *SEARCH[3:]]!r}; from tune_cac.__main__ import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", hook], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 130, done.stderr
    assert "nterrupted" in done.stderr


def test_sigterm_is_an_interrupt_before_a_commands_code_is_loaded(tmp_path: Path) -> None:
    """It was 143 in the first half second, while the code of the commands was imported."""
    hook = (
        "import sys, os, signal; sys.addaudithook(lambda event, args: os.kill(os.getpid(), signal.SIGTERM) "
        "if event == 'import' and args[0] == 'tune_cac.study.decoded_images' else None); "
        "from tune_cac.__main__ import run; sys.argv = ['tune_cac', 'spaces']; run()"
    )
    done = subprocess.run([sys.executable, "-c", hook], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines() == ["tune_cac: interrupted"]


@pytest.mark.thorough
def test_sigterm_counts_where_ctrl_c_is_ignored(tmp_path: Path) -> None:
    """As in the background of a shell script."""
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {shlex.join([*SEARCH, '--epochs', '200'])}"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    said_first(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err


@pytest.mark.thorough
def test_a_search_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """As in ``... 2>&1 | head -1``: the pipe is closed long before the first trial ends."""
    process = subprocess.Popen(SEARCH, cwd=tmp_path, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "3 trials of 4 epochs" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    assert analysis.load(tmp_path / "results" / "s")["status"].tolist() == ["completed"] * 3
    assert (tmp_path / "results" / "s" / "best.env").is_file()


def test_an_address_where_nobody_answers_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    begun = time.monotonic()
    assert main(["search", "--trials", "2"]) == 2
    assert time.monotonic() - begun < 60  # Ray alone tries for two minutes
    assert (
        "tune_cac: error: --address (or RAY_ADDRESS) must be the address of a Ray cluster that runs, got "
        f"127.0.0.1:{port} (Connection refused): start one with `ray start --head`"
    ) in capsys.readouterr().err


@pytest.mark.thorough
def test_something_else_that_listens_there_does_not_hold_the_search(tmp_path: Path) -> None:
    """It is interrupted at once; Ray in its own thread would not be."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            SEARCH, cwd=tmp_path, env={**os.environ, "RAY_ADDRESS": address}, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        server.settimeout(120)
        server.accept()[0].close()  # our own look; Ray's comes next
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def cluster_with_a_token() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, two_nodes_script.__file__],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.strip().replace(".", "").replace(":", "").isdigit())
    finally:
        process.communicate(timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}])
def test_a_cluster_that_wants_a_token_is_one_line(
    given: dict[str, str], cluster_with_a_token: str, tune_cac_command: Run, tmp_path: Path
) -> None:
    done = tune_cac_command("search", "--trials", "2", "--name", "s", RAY_ADDRESS=cluster_with_a_token, **given)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "gcs_client" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "tune_cac: error: --address (or RAY_ADDRESS) must be the address of a Ray cluster that runs, got "
        f"{cluster_with_a_token} ("
    )
    assert "give RAY_AUTH_MODE=token and RAY_AUTH_TOKEN if it asks for a token" in last


@pytest.mark.thorough
def test_a_cluster_with_its_token_is_joined(cluster_with_a_token: str, tune_cac_command: Run, tmp_path: Path) -> None:
    done = tune_cac_command(
        "search", "--trials", "2", "--epochs", "2", "--name", "s", "--no-controls", "--concurrency", "2",
        RAY_ADDRESS=cluster_with_a_token, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert analysis.load(tmp_path / "results" / "s")["status"].tolist() == ["completed"] * 2


PENALTY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels)

def make_model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

def loss(model, batch):
    value = nn.functional.cross_entropy(model(batch[0]), batch[1])
    first = next(model.parameters())
    gradient, = torch.autograd.grad(value, first, create_graph=True)  # raises once the first layer has stopped
    return value + 0.01 * gradient.square().sum()

def make():
    return {"model": make_model, "train": DataLoader(data(0, 60), batch_size=10, shuffle=True),
            "validation": DataLoader(data(1, 30), batch_size=30), "loss": loss, "epochs": 4}
"""


@pytest.mark.thorough
def test_a_loss_that_cannot_do_without_a_layer_fails_trials_and_no_search(
    tune_cac_command: Run, tmp_path: Path
) -> None:
    """The search counts what stopped steps cost when its baseline has ended; the loss raised there, and on resume."""
    (tmp_path / "penalty.py").write_text(PENALTY)
    done = tune_cac_command(
        "search", "--workload", "penalty:make", "--trials", "3", "--name", "s", "--concurrency", "1", "--no-controls"
    )
    assert "Traceback" not in done.stderr
    assert (
        "nothing was learned from the baseline: the cost of steps with stopped layers cannot be counted: the loss of "
        "workload penalty:make raised RuntimeError: One of the differentiated Tensors does not require grad"
    ) in done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].isin(["completed", "failed"]).all()
    assert trials.loc[0, "status"] == "completed"
    again = tune_cac_command("search", "--workload", "penalty:make", "--trials", "1", "--name", "s", "--no-controls")
    assert "Traceback" not in again.stderr
    assert len(analysis.load(tmp_path / "results" / "s")) == 4
