"""One of several processes that train a run together: python parallel_run_worker.py RANK SIZE STORE OUT CONFIG.

OUT.RANK.json gets the rows of each way, OUT.RANK.pt the last weights of each: trained through, and continued from a
checkpoint after the first epoch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from plain_workload import register

from trainables.config import TrialConfig
from trainables.training.parallel import ParallelRun


def main() -> None:
    """Train twice."""
    rank, size, store, out, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
    register()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    config = TrialConfig.from_mapping(json.loads(text))
    folder = out.with_suffix(".checkpoint")
    rows, weights = {}, {}
    with ParallelRun(config) as run:
        rows["through"] = [run.train_epoch()]
        run.save(folder)
        while not run.finished:
            rows["through"].append(run.train_epoch())
        weights["through"] = {name: value.clone() for name, value in run.model.state_dict().items()}
    dist.barrier()
    torch.manual_seed(99)  # what another process's generators would hold
    with ParallelRun(config) as run:
        run.load(folder)
        rows["continued"] = []
        while not run.finished:
            rows["continued"].append(run.train_epoch())
        weights["continued"] = {name: value.clone() for name, value in run.model.state_dict().items()}
    out.with_suffix(f".{rank}.json").write_text(json.dumps(rows))
    torch.save(weights, out.with_suffix(f".{rank}.pt"))
    dist.barrier()
    os._exit(0)  # torch#179291: gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
