"""What every benchmark prints first: machine, versions; how it takes times and prints spread."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any


def header(script: str) -> str:
    """Script, processor, cores, memory, Python and package versions, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "ray", "optuna", "pandas") if find_spec(p))
    return f"{script} | {model}, {os.cpu_count()} cores | Python {platform.python_version()}, {packages}"


def now(device: str) -> float:
    """Return seconds, after the device has finished."""
    if device == "cuda":
        import torch  # stopped_memory.py measures the import

        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Wall time of each call after a first one."""
    call()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.4g} (range {min(values):.4g} to {max(values):.4g}, n = {len(values)})"
