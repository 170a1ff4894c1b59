"""A run that trains in this process, with what its steps take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trainables.stage_tree.recorder import SignalRecorder
from trainables.training.run import TrainingRun


@dataclass(kw_only=True)
class LiveRun:
    """A run in this process."""

    run: TrainingRun
    recorder: SignalRecorder
    flops_at_load: int
    """Executed by whoever saved what was loaded."""
    steps: int = 0
    """Trained in this process."""
    step_s: float = 0.0
    """Of late."""
    slowest_s: float = 0.0
    """Of the steps in this process but the first."""
    evaluation_s: float = 0.0
    """Of the last one."""
    checkpointed: float = field(default_factory=time.monotonic)
    """When a crash last stopped costing what was trained before."""

    @property
    def executed_flops(self) -> int:
        """FLOPs executed in this process."""
        return self.run.executed_flops - self.flops_at_load

    def train_step(self) -> None:
        """One optimizer step, timed."""
        begun = time.perf_counter()
        self.run.train_step()
        took = time.perf_counter() - begun
        if self.steps > 0:  # the first one chooses kernels and counts FLOPs
            self.step_s = 0.9 * self.step_s + 0.1 * took if self.step_s else took
            self.slowest_s = max(self.slowest_s, took)
        self.steps += 1
