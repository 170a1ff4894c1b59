"""A user's workload whose trials have a fault when told: the next trial that finds a file of a fault's name has it."""

from __future__ import annotations

from pathlib import Path

#: Faults; a trial takes at most one.
FAULTS = ("hang", "nan", "cuda_memory", "memory")

_MODULE = """
import ctypes, os, pathlib, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = pathlib.Path({folder!r})
state = {{"taken": None, "calls": 0}}

def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator) + labels[:, None], labels)

def make_model():
    state.update(taken=None, calls=0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

def take():
    if not sys.argv[0].endswith("default_worker.py"):  # the search itself examines the workload, too
        return ""
    for name in {faults!r}:
        try:
            os.rename(FOLDER / name, FOLDER / f"{{name}}-{{os.getpid()}}")
        except OSError:
            continue
        return name
    return ""

def loss(model, batch):
    time.sleep({step_s})
    value = nn.functional.cross_entropy(model(batch[0]), batch[1])
    state["calls"] += 1
    if model.training and state["calls"] > 3:  # later than where costs are counted
        state["taken"] = state["taken"] or take()
    if state["taken"] == "hang":
        ctypes.PyDLL(None).sleep(1000)  # in C, with Python's lock held
    if state["taken"] == "nan":
        return value * float("nan")
    if state["taken"] == "cuda_memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if state["taken"] == "memory":
        kept = [torch.ones(2**26) for _ in range(20)]  # 5 GiB
        time.sleep(60)
    return value

def make():
    return {{"model": make_model, "train": DataLoader(data(0, 40), batch_size=10, shuffle=True),
            "validation": DataLoader(data(1, 30), batch_size=30), "loss": loss, "epochs": 6}}
"""


def write_faulty(folder: Path, step_s: float = 0.02) -> str:
    """Write the module into a folder and return the workload's name."""
    text = _MODULE.format(folder=str(folder), faults=FAULTS, step_s=step_s)
    (folder / "faulty.py").write_text(text)
    return "faulty:make"


def begin_fault(folder: Path, name: str) -> None:
    """Give a fault to the next trial that takes a step."""
    (folder / name).touch()


def holder_of_fault(folder: Path, name: str) -> int | None:
    """Return the process that has the fault; None before."""
    return next((int(path.name.rpartition("-")[2]) for path in folder.glob(f"{name}-*")), None)
