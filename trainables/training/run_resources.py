"""Time and memory of a run, including those before a loaded checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trainables.runtime.memory import peak_bytes, reset_peak
from trainables.runtime.stopwatch import Stopwatch


class RunResources:
    """Measure training time, wall time and peak memory of a run.

    Args:
        device: whose memory counts.
        started: `time.perf_counter` when the run began to be built.
        excluded: returns the running total of seconds that never count as training.
    """

    def __init__(self, device: torch.device, started: float, excluded: Callable[[], float]) -> None:
        self._device, self._started = device, started
        self.train_time = Stopwatch(excluded)
        """Seconds of training steps, without evaluation."""
        self._wall_time_before_s = 0.0
        self.peak_before = 0
        """Peak bytes in the process that saved the loaded checkpoint."""

    def reset_peak(self) -> None:
        """Begin a new memory peak."""
        reset_peak(self._device)

    @property
    def wall_time_s(self) -> float:
        """Return the seconds since the run was built."""
        return self._wall_time_before_s + time.perf_counter() - self._started

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory so far."""
        return max(self.peak_before, peak_bytes(self._device))

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured, as the result columns of the same names."""
        return {
            "train_time_s": self.train_time.elapsed_s,
            "wall_time_s": self.wall_time_s,
            "peak_memory_bytes": self.peak_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; other keys are ignored."""
        self.train_time.elapsed_s = state["train_time_s"]
        self._wall_time_before_s = state["wall_time_s"]
        self.peak_before = int(state["peak_memory_bytes"])
