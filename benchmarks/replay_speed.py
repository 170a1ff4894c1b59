"""How long replay takes: 100,000 settings at once, one alone, a trial whose outcome is known, and one that forks.

    python benchmarks/replay_speed.py [STUDY]

STUDY is the folder of a study of digits with sharing (default: one is made, 12 trials of 30 epochs). Settings are
drawn at random, thresholds in [0.9, 1] and iterations anywhere, as a search without grids would ask. Seconds include
everything from the DataFrame of settings to that of predictions; reading the study is its own line. One run before
the clock starts.

A known trial reads the rows and signals of its path and trains nothing. Of one that forks, the figure is what it took
beyond its training and evaluation: recording, checkpoints, publishing, loading, building.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import header, seconds, spread

import analysis
from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace, load_trace
from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun

MANY, SINGLE, REPEATS = 100_000, 200, 5


def random_settings(count: int, steps: int, seed: int = 0) -> pd.DataFrame:
    """Settings with a column for each number of the rule."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "CAC_VAR_START_ITR": rng.integers(0, steps // 2 + 1, count),
            "CAC_VAR_START_THR": rng.uniform(0.9, 1, count),
            "CAC_VAR_MT_COUNT_THR": rng.integers(0, 21, count),
            "CAC_VAR_MT_THR": rng.uniform(0.9, 1, count),
            "CAC_VAR_SLOPE_THR": rng.uniform(0.9, 1, count),
            "CAC_VAR_SAMPLES": np.exp(rng.uniform(0, np.log(steps / 15 + 1), count)).astype(int),
            "CAC_BRAKING_DISTANCE": steps // 50 * rng.integers(0, 6, count),
        }
    )


def measure(trace: RunTrace) -> None:
    """Print both."""
    settings = random_settings(MANY, trace.total_steps)
    found = replay(trace, settings)
    print(
        f"{trace.total_steps} steps, {len(trace.stages)} stages; {MANY} settings: {found['stop_events'].nunique()} "
        f"distinct outcomes, {int(found['exact'].sum())} of the settings exact"
    )
    print(f"{MANY} settings at once, seconds: {spread(seconds(lambda: replay(trace, settings), REPEATS))}")
    singles = [TrialConfig.from_mapping(row) for row in settings.head(SINGLE).to_dict("records")]
    singles = [config for config in singles if replay(trace, config)["stops"].iloc[0] > 0]
    times = [1000 * seconds(lambda config=config: replay(trace, config), 1)[0] for config in singles]
    print(f"one setting that stops something, ms: {spread(times)}")


ROUNDS = 30
STOPS: dict[str, Any] = {"CAC_STOP_LAYER_NUM": (2, 5, 8), "CAC_STOP_LAYER_ITR": (120, 180, 240)}


def trained(config: TrialConfig, sharing: Sharing) -> tuple[float, int]:
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
        wall_s, steps = trained(config, sharing)
    finally:
        for name in names:
            setattr(TrainingRun, name, before[name])
    return wall_s - counted[0], steps


def alone(config: TrialConfig) -> float:
    """Seconds of the same without a tree."""
    begun = time.perf_counter()
    with TrainingRun(config) as run:
        while not run.finished:
            run.train_epoch()
    return time.perf_counter() - begun


def trials() -> None:
    """Print what a known trial and one that forks take."""
    print("digits, 30 epochs, three stops")
    dense, stopped = TrialConfig(method="none"), TrialConfig(**STOPS)
    alone(dense)
    alone(stopped)
    recorded, plain = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(alone(dense))
            recorded.append(trained(dense, Sharing(tree=Path(folder) / "tree", trials=100))[0])
    print(
        "dense run, recorded and checkpointed, over the run alone:",
        spread([r / p for r, p in zip(recorded, plain, strict=True)]),
    )
    with tempfile.TemporaryDirectory() as folder:
        sharing = Sharing(tree=Path(folder) / "tree", trials=100)
        trained(dense, sharing)
        trained(stopped, sharing)
        times = [trained(stopped, sharing) for _ in range(ROUNDS)]
        assert all(steps == 0 for _, steps in times)
        print("known trial, ms:", spread([1000 * s for s, _ in times]))
        forked = [
            bookkeeping(TrialConfig(CAC_STOP_LAYER_NUM=(2, 5, 8), CAC_STOP_LAYER_ITR=(120, 180, last)), sharing)
            for last in range(241, 251)
        ]
        print("forked trial, ms beyond training and evaluating:", spread([1000 * s for s, _ in forked]))
        print("steps trained by them:", forked[0][1], "to", forked[-1][1])


def main() -> None:
    """Measure on the study given, or on a new one."""
    print(header("benchmarks/replay_speed.py"))
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            study = Path(sys.argv[1])
        else:
            import tune_cac

            study = tune_cac.search(trials=12, results=folder, name="digits", controls=False).folder
        begun = time.perf_counter()
        trace = load_trace(study)
        print(f"reading the study, {len(analysis.load(study))} trials, seconds: {time.perf_counter() - begun:.3g}")
        measure(trace)
    trials()


if __name__ == "__main__":
    main()
