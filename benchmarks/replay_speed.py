"""How long replay takes: 100,000 settings of the variance rule at once, and one alone.

    python benchmarks/replay_speed.py [STUDY]

STUDY is the folder of a study of digits with sharing (default: one is made, 12 trials of 30 epochs). Settings are
drawn at random, thresholds in [0.9, 1] and iterations anywhere, as a search without grids would ask. Seconds include
everything from the DataFrame of settings to that of predictions; reading the study is its own line. One run before
the clock starts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from machine import header, seconds, spread

import analysis
from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace, load_trace
from trainables.config import TrialConfig

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


if __name__ == "__main__":
    main()
