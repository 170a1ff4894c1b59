"""A run that trains in this process, with timings of its steps."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainables.config import TrialConfig
from trainables.runtime.checkpoint_folder import read_state
from trainables.stage_tree.packing import unpack
from trainables.stage_tree.recorder import SignalRecorder
from trainables.training.run import TrainingRun


@dataclass(kw_only=True)
class LiveRun:
    """A run in this process, with its recorder and timings."""

    run: TrainingRun
    recorder: SignalRecorder
    flops_at_load: int
    """FLOPs executed before the loaded checkpoint."""
    steps: int = 0
    """Steps trained in this process."""
    step_s: float = 0.0
    """Moving average of the time of a step."""
    slowest_s: float = 0.0
    """Time of the slowest step in this process, except the first."""
    evaluation_s: float = 0.0
    """Time of the last evaluation."""
    checkpointed: float = field(default_factory=time.monotonic)
    """Monotonic time of the last checkpoint or of the start; a crash loses only later training."""

    @property
    def executed_flops(self) -> int:
        """Return the FLOPs executed in this process."""
        return self.run.executed_flops - self.flops_at_load

    def train_step(self) -> None:
        """Train and time one optimizer step."""
        begun = time.perf_counter()
        self.run.train_step()
        took = time.perf_counter() - begun
        if self.steps > 0:  # the first step selects kernels and counts FLOPs
            self.step_s = 0.9 * self.step_s + 0.1 * took if self.step_s else took
            self.slowest_s = max(self.slowest_s, took)
        self.steps += 1


def resume_live(
    config: TrialConfig,
    data: bytes | None,
    metadata: Mapping[str, Any],
    replay_state: Mapping[str, Any],
    watches: Sequence[tuple[str, ...]],
) -> LiveRun:
    """Build a run that records its signals, from its start or from a checkpoint of the tree.

    Args:
        config: configuration of the trial.
        data: a checkpoint as stored in the tree; None: from the start.
        metadata: facts about the model that the tree has stored for this method.
        replay_state: state of the trial's replay.
        watches: values of ``CAC_WATCH`` whose layers are also recorded.

    Raises:
        RuntimeError, KeyError, EOFError, UnpicklingError: the checkpoint cannot be loaded.
    """
    run = TrainingRun(config)
    try:
        found = run.method.model_metadata()
        if json.dumps(found) != json.dumps(metadata):
            raise AssertionError(
                "internal error: the method sees other layers in this model than the stage tree has noted for its "
                f"settings: {found}, not {metadata}; --no-sharing trains without the tree"
            )
        if data is not None:
            state = unpack(read_state(io.BytesIO(data)))
            training_state = state.pop("training_state")
            run.method.prepare_structure(training_state)
            run.load_state_dict({**state, "row": None, "wall_time_s": 0.0, "search_flops": 0, "method": {}})
            run.method.resume(replay_state, training_state)
        recorder = SignalRecorder(run, watches)
    except BaseException:
        run.close()
        raise
    return LiveRun(run=run, recorder=recorder, flops_at_load=run.executed_flops)
