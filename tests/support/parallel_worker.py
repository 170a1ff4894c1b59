"""One of several gloo processes that train together; started by torchrun from test_data_parallel.py.

    torchrun --nproc-per-node 2 parallel_worker.py OUTPUT_FOLDER CASE [CASE ...]

Of each case each process saves its weights, events, and the bytes of gradients that it sent at each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip import SGD, AdamW, DistributedDataParallel, Settings, wrap

STEPS = 16
AUTO = Settings(start_itr=2, samples=3, start_thr=1.0, slope_thr=1.0, mt_thr=1.0)
BRAKING = Settings(stop_layer_num=(1, 3), stop_layer_itr=(3, 8), braking_distance=3)
CASES: dict[str, tuple[str, Settings]] = {
    "auto": ("sgd", AUTO),
    "braking": ("adamw", BRAKING),
    "whole": ("wrap", Settings(**{**AUTO.__dict__, "whole_units": True})),
    "disagreeing": ("sgd", AUTO),
    "accumulating": ("sgd", BRAKING),
    "plain": ("sgd", BRAKING),
    "sharded-auto": ("sgd", AUTO),
    "sharded-braking": ("adamw", BRAKING),
    "sharded-norms": ("sgd", Settings(rule="gradient_norm", rule_start_itr=2, rule_interval=3, rule_percentile=60)),
    "sharded-plasticity": ("sgd", Settings(rule="plasticity")),
    "static": ("sgd", AUTO),
    "static-later": ("adamw", BRAKING),
    "no-sync-at-a-stop": ("sgd", BRAKING),
    "join": ("sgd", AUTO),
    "join-after": ("sgd", BRAKING),
    "norms": ("sgd", Settings(rule="gradient_norm", rule_start_itr=2, rule_interval=3, rule_percentile=60)),
}


def make_model() -> nn.Module:
    """No batch norm, so that the joint batch is the sum of its parts; float64, so that sums may be reordered."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 5)
    ).double()


def make_optimizer(kind: str, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """By kind; strong weight decay makes variances fall."""
    if kind == "sgd":
        return SGD(model.parameters(), lr=0.02, momentum=0.5, weight_decay=2.0, settings=settings, model=model)
    if kind == "adamw":
        return AdamW(model.parameters(), lr=0.01, weight_decay=1.0, settings=settings, model=model)
    return wrap(torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=5.0), settings, model=model)


def joint_batches() -> list[tuple[Tensor, Tensor]]:
    """Eight samples a step."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator).double(), torch.randint(5, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def main(case: str, folder: Path) -> None:
    """Train and save."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, settings = CASES[case]
    model = make_model()
    sent: list[int] = []

    def count_and_send(state, bucket):  # torch refuses annotations that are strings
        sent[-1] += bucket.buffer().nbytes
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / size)

    if case.startswith("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for layer in model:  # type: ignore[attr-defined]
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(kind, model, settings)
    parallel: Any = model
    if case == "plain":
        parallel = nn.parallel.DistributedDataParallel(model)
    elif not case.startswith("sharded"):
        parallel = DistributedDataParallel(model, optimizer, static_graph=case == "static")
        assert isinstance(parallel, nn.parallel.DistributedDataParallel)
        if case == "static-later":
            parallel._set_static_graph()
        parallel.register_comm_hook(None, count_and_send)
    forwards: list[int] = []
    parallel.register_forward_hook(lambda *_: forwards.append(1))
    skip: Any = optimizer.gradskip  # type: ignore[attr-defined]
    if case == "disagreeing":
        honest = skip.signal.measure
        noise = torch.Generator().manual_seed(rank)
        skip.signal.measure = lambda units: honest(units) * torch.rand((), generator=noise).double()
    error = None
    live = []
    for x, y in joint_batches():
        sent.append(0)
        own = slice(rank * 8 // size, (rank + 1) * 8 // size)
        optimizer.zero_grad()
        live.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        try:
            if case == "no-sync-at-a-stop" and len(sent) in (7, 12):  # the first pass after each stop is one without
                with parallel.no_sync():
                    (nn.functional.cross_entropy(parallel(x[own]), y[own]) * 0).backward()
                assert sent[-1] == 0
                nn.functional.cross_entropy(parallel(x[own]), y[own]).backward()
            elif case == "accumulating":
                first, second = (slice(own.start, own.start + 2), slice(own.start + 2, own.stop))
                with parallel.no_sync():
                    (nn.functional.cross_entropy(parallel(x[first]), y[first]) / 2).backward()
                (nn.functional.cross_entropy(parallel(x[second]), y[second]) / 2).backward()
            else:
                nn.functional.cross_entropy(parallel(x[own]), y[own]).backward()
        except RuntimeError as raised:
            error = str(raised)
            break
        optimizer.step()
    weights = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    result = {
        "weights": [w.clone() for w in weights],
        "events": [(e.iteration, e.layer, e.name) for e in skip.events],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "sent": sent,
        "live": live,
        "error": error,
        "forwards": len(forwards),
        "keys": list(parallel.state_dict()) if not case.startswith("sharded") else [],
    }
    torch.save(result, folder / f"{case}-{rank}.pt")
    if error is None:
        dist.barrier()


def join(case: str, folder: Path) -> None:
    """Train on one batch more in the second process, and save what that came to."""
    rank = dist.get_rank()
    kind, settings = CASES[case]
    model = make_model()
    optimizer = make_optimizer(kind, model, settings)
    parallel = DistributedDataParallel(model, optimizer)
    x, y = joint_batches()[0]

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()

    for _ in range(12 if case == "join-after" else 3):
        step()
    error, steps = "", 0
    try:
        with parallel.join():
            for _ in range(2 + rank):
                step()
                steps += 1
    except UserError as raised:
        error = str(raised)
    torch.save({"error": error, "steps": steps}, folder / f"{case}-{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        (join if case.startswith("join") else main)(case, Path(sys.argv[1]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch#179291: gloo's threads may abort an interpreter that ends
