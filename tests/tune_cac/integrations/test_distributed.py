"""Checkpoints of torch.distributed.checkpoint before, between and after stops, in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainables.gradskip import Settings

STOPS = Settings(watch=("linear",), stop_layer_num=(1, 3), stop_layer_itr=(3, 8), braking_distance=3)
WORKER = f"""
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from trainables.gradskip import DistributedDataParallel, Settings, wrap
from tune_cac.integrations.distributed import load, save

dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]


def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=0.01), {STOPS!r}, model=net)
    return DistributedDataParallel(net, optimizer) if kind == "ddp" else net, optimizer


def trained(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


def whole(model):
    return [p.full_tensor() if kind == "fsdp2" else p.detach() for p in model.parameters()]


model, optimizer = made()
for step in range(14):
    trained(model, optimizer, [step])
    if step + 1 in (2, 5, 7, 12):
        save(f"{{kind}}-{{step + 1}}", model, optimizer)
end = whole(model)
for begin in (2, 5, 7, 12):
    model, optimizer = made()
    load(f"{{kind}}-{{begin}}", model, optimizer)
    trained(model, optimizer, range(begin, 14))
    assert optimizer.gradskip.iteration == 14
    assert [event.iteration for event in optimizer.gradskip.events] == [3, 8]
    assert all(torch.equal(a, b) for a, b in zip(end, whole(model), strict=True)), begin
torch.save(end, f"{{kind}}-{{rank}}.pt")
dist.barrier()
os._exit(0)  # torch#179291: gloo's threads may abort an interpreter that ends
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_loaded_training_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "worker.py",
        kind,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{kind}-{rank}.pt") for rank in (0, 1))
    assert all(map(torch.equal, first, second))
