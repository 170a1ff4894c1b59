"""Peak memory of a run: allocated bytes on CUDA, resident bytes of the process on the CPU."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Start a new peak, where the system supports it (CUDA; Linux through /proc/self/clear_refs)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # elsewhere the peak is that since the process started
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak`, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
