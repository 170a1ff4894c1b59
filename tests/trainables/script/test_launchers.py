"""Scripts that a launcher runs in several processes: one of them reports, for all, and none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import rows_to_the_end

from trainables.config import TrialConfig
from trainables.script.run import ERRORS_FILE, ScriptFailed, ScriptRun

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --nproc-per-node 2",
    # Without GPUs it starts processes for gloo, as torchrun does.
    "accelerate": "-m accelerate.commands.accelerate_cli launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no",
}
#: Trains on the same 60 rows in any number of processes; all of them report, when the group is gone.
TRAIN = """
import os, torch, tune_cac as cac
import torch.distributed as dist
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))
optimizer = cac.gradskip.SGD(net.parameters(), lr=0.1, weight_decay=0.02, model=net)
model = net
if size > 1:
    dist.init_process_group("gloo")
    model = cac.gradskip.DistributedDataParallel(net, optimizer)
rows, labels = torch.randn(60, 8)[rank::size], torch.arange(60)[rank::size] % 3
for part in torch.arange(60 // size).split(20 // size):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(rows[part]), labels[part]).backward()
    optimizer.step()
if size > 1:
    dist.barrier()  # gloo may abort a process whose peer has left
    dist.destroy_process_group()
cac.report(accuracy=0.5 + rank / 10)
"""
#: Two processes that report without our help, and differently.
LINES = """
import os, sys
rank = os.environ["RANK"]
for epoch in (1, 2):
    print(f'{{"accuracy": 0.{epoch + 4 * int(rank)}, "epoch": {epoch}, "compute_saved": 0}}', flush=True)
os.write(2, f"told by {rank}\\n".encode())  # in one piece, for the processes share the file
"""
#: The second process fails, and then the first, which waits for it.
FAILING = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    raise ValueError("the batch has no labels")
dist.barrier()
"""
#: Processes that train for ever, and hear no SIGTERM.
ENDLESS = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(os.environ["RANK"] + ".tmp").write_text(str(os.getpid()))
os.rename(os.environ["RANK"] + ".tmp", os.environ["RANK"] + ".pid")
time.sleep(600)
"""


def rows_of(launcher: str, text: str, folder: Path) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(text)
    return rows_to_the_end(begun(f"{sys.executable} {launcher} train.py", folder))


def begun(command: str, folder: Path) -> ScriptRun:
    options = (f"command={command}", f"cwd={folder}")
    return ScriptRun(TrialConfig(workload="script", workload_options=options, epochs=1, method="none"), folder)


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_process_reports_the_flops_of_all(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_REDIRECTS", "0")  # the user's own: what every process prints arrives
    [row] = rows_of(LAUNCHERS[launcher], TRAIN, tmp_path)
    assert row["quality"] == 0.5
    assert row["step"] == 3
    # 60 rows, once each, whoever trains on them; the first layer's input needs no gradient.
    weights = (8 * 16, 16 * 16, 16 * 3)
    assert row["forward_flops"] == 60 * 2 * sum(weights)
    assert row["executed_flops"] == row["dense_flops"] == 60 * 2 * (3 * sum(weights) - weights[0])
    assert row["compute_saved"] == row["backward_saved"] == 0


@pytest.mark.thorough
def test_lines_that_every_process_prints_count_once(tmp_path: Path) -> None:
    rows = rows_of(LAUNCHERS["torchrun"], LINES, tmp_path)
    assert [(row["epoch"], row["quality"]) for row in rows] == [(1, 0.1), (2, 0.2)]
    log = (tmp_path / ERRORS_FILE).read_text()
    assert "told by 0" in log
    assert "told by 1" in log  # what goes wrong in any process is shown
    [others] = tmp_path.glob("ranks/*/attempt_0/1/stdout.log")
    assert '"accuracy": 0.6' in others.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failure_shows_the_process_that_failed_first(launcher: str, tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed, match=r"ValueError: the batch has no labels$") as failure:
        rows_of(LAUNCHERS[launcher], FAILING, tmp_path)
    assert "exit code 1; its last lines: [rank1]: Traceback" in str(failure.value)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["the launcher is killed", "the trial is stopped"])
def test_no_process_outlives_its_launcher(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    run = begun(f"exec {sys.executable} {LAUNCHERS['torchrun']} train.py", tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(found := list(tmp_path.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = [psutil.Process(int(file.read_text())) for file in found]
        [launcher] = {worker.parent() for worker in workers}
        assert launcher is not None
        assert os.getsid(workers[0].pid) != os.getsid(os.getpid())
        if how == "the launcher is killed":
            launcher.send_signal(signal.SIGKILL)
            with pytest.raises(ScriptFailed, match="ended by signal 9"):
                run.train_epoch()
    finally:
        run.close()
    assert not any(process.is_running() for process in [launcher, *workers])
