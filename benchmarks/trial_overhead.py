"""What a trial costs beyond its training: actor reuse (ours) beside a fresh process each (Ray's default).

    python benchmarks/trial_overhead.py

One trial at a time. The overhead of a trial is the time from the end of the one before to its own end, less the
wall time that the run itself measured (building, training, evaluating). The first trial, which pays for starting
Ray and the process, is left out.
"""

from __future__ import annotations

import logging
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import header, spread
from ray import tune

from trainables.config import TrialConfig
from trainables.trial import Trial
from tune_cac.ray_backend.session import ray_session

TRIALS, EPOCHS = 9, 30


class Clock(tune.Callback):
    """When each trial ended, and how long its run took by its own clock."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.runs_s: list[float] = []
        self._last: dict[str, float] = {}

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Remember the newest wall time."""
        self._last[trial.trial_id] = result["wall_time_s"]

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        """Note the end."""
        self.ends_s.append(time.perf_counter())
        self.runs_s.append(self._last[trial.trial_id])


def overheads(*, reuse_actors: bool) -> list[float]:
    """Seconds of overhead of each trial but the first."""
    clock = Clock()
    config = {"config": TrialConfig(method="none", epochs=EPOCHS).to_dict(), "trial": 0, "resume_from": None}
    with tempfile.TemporaryDirectory() as folder:
        tune.Tuner(
            tune.with_resources(Trial, {"cpu": 1}),
            param_space=config,
            tune_config=tune.TuneConfig(num_samples=TRIALS, max_concurrent_trials=1, reuse_actors=reuse_actors),
            run_config=tune.RunConfig(storage_path=str(Path(folder)), verbose=0, callbacks=[clock]),
        ).fit()
    return [end - before - run for (before, end), run in zip(pairwise(clock.ends_s), clock.runs_s[1:], strict=True)]


def main() -> None:
    """Print both."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    print(header("benchmarks/trial_overhead.py"), f"| {TRIALS} trials of {EPOCHS} epochs of digits, one at a time")
    with ray_session(cpus=1):
        for name, reuse in (("actor reuse (ours)", True), ("a process each (Ray's default)", False)):
            print(f"{name:<32} overhead a trial in seconds: {spread(overheads(reuse_actors=reuse))}")


if __name__ == "__main__":
    main()
