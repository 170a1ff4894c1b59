"""How long ranking takes: 100,000 trials, and fronts in two and more objectives.

    python benchmarks/ranking_speed.py

Two kinds of values, uniform random ones and, the worst case, points of a sphere, all of which are on the front. The
frame that is ranked has every column of `analysis.load` and hyperparameters drawn at random, one trial in ten a
duplicate. Seconds of each call after a first one.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from machine import header, seconds, spread
from numpy.typing import NDArray

import analysis
from analysis.io.studies import to_frame
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.metrics.ranking import pareto_front

TRIALS, REPEATS = 100_000, 7


def random_trials(count: int, seed: int = 0) -> pd.DataFrame:
    """A study of so many completed trials."""
    rng = np.random.default_rng(seed)
    trials = to_frame(
        [
            {"trial": 0, "role": "baseline", "status": "completed", "error": None, "row": {}, "config": config}
            for config in ({"method": "none", "workload": "digits", "epochs": 30, "seed": 0},)
        ]
    )
    trials = trials.loc[np.zeros(count, dtype=int)].reset_index(drop=True)
    number = np.arange(count)
    first = np.where(rng.random(count) < 0.1, rng.integers(0, number + 1), number)  # what it is a duplicate of
    trials["trial"] = number
    trials["role"] = pd.array(np.where(number == 0, "baseline", "search"), dtype="string")
    trials["method"] = pd.array(np.where(number == 0, "none", "gradskip"), dtype="string")
    trials["accuracy"] = 0.97 - rng.integers(0, 30, count)[first] / 599  # counts over a test set: many ties
    trials["test_accuracy"] = trials["accuracy"]
    trials["compute_saved"] = rng.random(count).round(4)[first]
    trials["backward_saved"] = trials["compute_saved"] * rng.uniform(1, 1.5, count)[first]
    trials["stage"] = pd.array([f"{number:024x}" for number in first], dtype="string")
    trials["train_time_s"] = rng.uniform(5, 10, count)
    for name in ("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR"):
        trials[name] = rng.uniform(0.9, 1, count)[first]
    for name in ("CAC_VAR_START_ITR", "CAC_VAR_SAMPLES", "CAC_VAR_MT_COUNT_THR"):
        trials[name] = rng.integers(0, 100, count)[first].astype(float)
    return trials


def sphere(count: int, columns: int, seed: int = 0) -> NDArray[np.float64]:
    """Points of which none dominates another."""
    points = np.abs(np.random.default_rng(seed).normal(size=(count, columns)))
    return points / np.linalg.norm(points, axis=1)[:, None]


def main() -> None:
    """Measure and print."""
    print(header("benchmarks/ranking_speed.py"))
    for columns in (2, 3, 4):
        for kind, values in (
            ("uniform", np.random.default_rng(0).random((TRIALS, columns))),
            ("all on the front", sphere(TRIALS, columns)),
        ):
            size = int(non_dominated(values).sum())
            print(
                f"non_dominated, {TRIALS} rows, M = {columns}, {kind} ({size} on the front), seconds: "
                + spread(seconds(lambda values=values: non_dominated(values), REPEATS))
            )
    for count, columns in ((1000, 2), (1000, 3), (100, 4)):
        values, origin = sphere(count, columns), np.zeros(columns)
        print(
            f"hypervolume, front of {count}, M = {columns}, seconds: "
            + spread(seconds(lambda values=values, origin=origin: hypervolume(values, origin), REPEATS))
        )
    trials = random_trials(TRIALS)
    ranking = analysis.rank(trials)
    print(f"a frame of {len(trials)} trials, {trials.shape[1]} columns, {ranking['duplicate_of'].count()} duplicates")
    print(f"rank, seconds: {spread(seconds(lambda: analysis.rank(trials), REPEATS))}")
    print(f"rank with a price, seconds: {spread(seconds(lambda: analysis.rank(trials, price=0.1), REPEATS))}")
    three = ("accuracy", "compute_saved", "train_time_s")
    print(f"pareto_front, 2 objectives, seconds: {spread(seconds(lambda: pareto_front(trials), REPEATS))}")
    print(f"pareto_front, 3 objectives, seconds: {spread(seconds(lambda: pareto_front(trials, three), REPEATS))}")


if __name__ == "__main__":
    main()
