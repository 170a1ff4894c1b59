"""The device that trains a run faster, measured on a few steps of it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from math import ceil

from trainables.config import TrialConfig
from trainables.registry import SCRIPT

#: Steps that are timed on each device, after some that are not.
STEPS, _FIRST_STEPS = 20, 3
#: Most trials that share a GPU: their kernels take turns, so more of them fill its memory, not its pauses.
MOST_TRIALS = 4
#: Bytes that CUDA needs for a process beside its tensors, and share of a GPU's memory that trials may fill.
_CONTEXT_BYTES, _FILLED = 600 * 2**20, 0.9


@dataclass(frozen=True)
class DeviceChoice:
    """A device, and why it was chosen."""

    device: str
    why: str
    gpus_per_trial: float = 0.0

    def __str__(self) -> str:
        return f"on {'the CPU' if self.device == 'cpu' else 'the GPU'} ({self.why})"


def sees_gpu() -> bool:
    """Return whether torch sees a CUDA device; builds that cannot are known without loading torch, which takes long."""
    if sys.platform == "darwin" or version("torch").endswith("+cpu"):
        return False
    import torch

    return torch.cuda.is_available()


def choose_device(config: TrialConfig, *, at_a_time: int = 1) -> DeviceChoice:
    """Return the device on which trials like this one, trained without a method, are faster.

    `STEPS` steps are timed on the GPU and on the CPU. Trials share a GPU as if one alone used all of it, and each has a
    processor of its own, so the GPU has to be faster than the ``at_a_time`` processors together.
    """
    if not sees_gpu():
        return DeviceChoice("cpu", "torch sees no GPU")
    import torch

    gpus = torch.cuda.device_count()
    if config.workload == SCRIPT:
        return DeviceChoice("cuda", "a script takes the one that it sees", 1.0)
    if config.workers > gpus:
        return DeviceChoice("cpu", f"{config.workers} workers a trial, and {gpus} GPUs")
    try:
        gpu_s, used_bytes = step_time_s(replace(config, device="cuda", workers=1))
    except RuntimeError as error:
        return DeviceChoice("cpu", f"training fails on the GPU: {str(error).splitlines()[0]}")
    cpu_s, _ = step_time_s(replace(config, device="cpu", workers=1), most_s=2 * STEPS * at_a_time * gpu_s)
    times = f"a step takes {1000 * gpu_s:.3g} ms on the GPU and {1000 * cpu_s:.3g} ms on a processor"
    if gpu_s * at_a_time >= cpu_s:
        return DeviceChoice("cpu", times + (f", of which {at_a_time} train at a time" if at_a_time > 1 else ""))
    if config.workers > 1:
        return DeviceChoice("cuda", times, 1.0)
    fit = int(_FILLED * torch.cuda.mem_get_info()[1] / (used_bytes + _CONTEXT_BYTES))
    each = max(1, min(fit, ceil(at_a_time / gpus), MOST_TRIALS))
    return DeviceChoice("cuda", times + (f"; {each} trials share one" if each > 1 else ""), 1 / each)


def step_time_s(config: TrialConfig, *, most_s: float = float("inf")) -> tuple[float, int]:
    """Return the mean seconds of an optimizer step, none begun after ``most_s``, and the peak of memory in bytes."""
    import torch

    from trainables.training.run import TrainingRun

    with TrainingRun(config) as run:

        def trained_s(steps: int) -> float:
            begun, done = time.perf_counter(), 0
            for _ in islice(run.each_step(), steps):
                run.train_step()
                done += 1
                if time.perf_counter() - begun >= most_s:
                    break
            run.pause()
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - begun) / done

        steps = min(STEPS, run.total_steps // 2)
        trained_s(max(1, min(_FIRST_STEPS, run.total_steps - steps)))
        found = trained_s(max(1, steps))
        used = torch.cuda.max_memory_reserved() if config.device == "cuda" else run.peak_bytes
    return found, int(used)
