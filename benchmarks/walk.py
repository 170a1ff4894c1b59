"""What walking costs: a trial whose interventions are all known, and the bookkeeping of one that is trained.

    python benchmarks/walk.py

digits, 30 epochs, in this process. A known trial reads the rows and signals of its path and trains nothing; the first
time a process walks a path it reads files, later they are in memory or in the page cache. Bookkeeping of a trained
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


def walk(config: TrialConfig, sharing: Sharing) -> tuple[float, int]:
    """Seconds from the trial's start to its last row, and the steps that it trained."""
    begun = time.perf_counter()
    with SharedRun(config, sharing) as trial:
        while not trial.finished:
            trial.train_epoch()
    return time.perf_counter() - begun, trial.trained_steps


def alone(config: TrialConfig) -> float:
    """Seconds of the same without a tree."""
    begun = time.perf_counter()
    with TrainingRun(config) as run:
        while not run.finished:
            run.train_epoch()
    return time.perf_counter() - begun


def main() -> None:
    """Print the times."""
    print(header("benchmarks/walk.py"), "| digits, 30 epochs, three stops")
    dense, stopped = TrialConfig(method="none"), TrialConfig(**STOPS)
    alone(dense)
    alone(stopped)
    recorded, plain = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(alone(dense))
            recorded.append(walk(dense, Sharing(tree=Path(folder) / "tree", trials=100))[0])
    print(
        "dense run, recorded and checkpointed, over the run alone:",
        spread([r / p for r, p in zip(recorded, plain, strict=True)]),
    )
    with tempfile.TemporaryDirectory() as folder:
        sharing = Sharing(tree=Path(folder) / "tree", trials=100)
        walk(dense, sharing)
        walk(stopped, sharing)
        times = [walk(stopped, sharing) for _ in range(ROUNDS)]
        assert all(steps == 0 for _, steps in times)
        print("known trial, ms:", spread([1000 * seconds for seconds, _ in times]))


if __name__ == "__main__":
    main()
