"""Measure the cost of replay: a trial whose interventions are all known, and the bookkeeping of one that is trained.

    python benchmarks/known_trial.py

digits, 30 epochs, in this process. A known trial reads the rows and signals of its path and trains nothing; the first
time a process replays a path it reads files, later they are in memory or in the page cache. Bookkeeping of a trained
trial is what it took beyond its training and evaluation: recording, checkpoints, publishing, loading, building.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from machine import header, spread

from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

ROUNDS = 30
STOPS: dict[str, Any] = {"CAC_STOP_LAYER_NUM": (2, 5, 8), "CAC_STOP_LAYER_ITR": (120, 180, 240)}


def replay(config: TrialConfig, sharing: Sharing) -> tuple[float, int]:
    """Seconds from the trial's start to its last row, and the steps that it trained."""
    begun = time.perf_counter()
    with SharedRun(config, sharing) as trial:
        while not trial.finished:
            trial.train_epoch()
    return time.perf_counter() - begun, trial.trained_steps


def bookkeeping(config: TrialConfig, sharing: Sharing) -> tuple[float, int]:
    """Seconds that a trial takes beyond training steps and evaluations, and the steps that it trained."""
    counted = [0.0]

    def timed(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return real(*arguments)
            finally:
                counted[0] += time.perf_counter() - begun

        return call

    names = ("train_step", "end_epoch")
    before = {name: getattr(TrainingRun, name) for name in names}
    for name in names:
        setattr(TrainingRun, name, timed(before[name]))
    try:
        seconds, steps = replay(config, sharing)
    finally:
        for name in names:
            setattr(TrainingRun, name, before[name])
    return seconds - counted[0], steps


def alone(config: TrialConfig) -> float:
    """Seconds of the same without a tree."""
    begun = time.perf_counter()
    with TrainingRun(config) as run:
        while not run.finished:
            run.train_epoch()
    return time.perf_counter() - begun


def main() -> None:
    """Print the times."""
    print(header("benchmarks/known_trial.py"), "| digits, 30 epochs, three stops")
    dense, stopped = TrialConfig(method="none"), TrialConfig(**STOPS)
    alone(dense)
    alone(stopped)
    recorded, plain = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(alone(dense))
            recorded.append(replay(dense, Sharing(tree=Path(folder) / "tree", trials=100))[0])
    print(
        "dense run, recorded and checkpointed, over the run alone:",
        spread([r / p for r, p in zip(recorded, plain, strict=True)]),
    )
    with tempfile.TemporaryDirectory() as folder:
        sharing = Sharing(tree=Path(folder) / "tree", trials=100)
        replay(dense, sharing)
        replay(stopped, sharing)
        times = [replay(stopped, sharing) for _ in range(ROUNDS)]
        assert all(steps == 0 for _, steps in times)
        print("known trial, ms:", spread([1000 * seconds for seconds, _ in times]))
        forked = [
            bookkeeping(TrialConfig(CAC_STOP_LAYER_NUM=(2, 5, 8), CAC_STOP_LAYER_ITR=(120, 180, last)), sharing)
            for last in range(241, 251)
        ]
        print("forked trial, ms beyond training and evaluating:", spread([1000 * seconds for seconds, _ in forked]))
        print("steps trained by them:", forked[0][1], "to", forked[-1][1])


if __name__ == "__main__":
    main()
