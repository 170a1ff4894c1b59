"""Measure the luck that a dense run has in common with itself cut short, and what its own epochs say of it.

    python benchmarks/common_luck.py [--seeds 50] [--first 100]

The digits are trained on each seed without a method, under a constant learning rate and under drops at fixed epochs,
whose cut runs are states of the full run. For some lengths, over the seeds: the loss of the validation accuracy at that
epoch against the end, how far both correlate, and how far the former deviates in the luck of one run; beside the latter
two what `luck_in_common` and `deviation_of_state` take them for, given the epochs of one run, as median and quartiles.
"""

from __future__ import annotations

import argparse

import numpy as np
from common_start import EPOCHS
from machine import header

from trainables.config import TrialConfig
from trainables.quality import ACCURACY
from trainables.training.run import TrainingRun
from tune_cac.tuning.outcomes.common_luck import deviation_of_state, luck_in_common
from tune_cac.tuning.outcomes.seed_luck import loss_scale

LENGTHS = (15, 18, 21, 24, 27)


def accuracies(schedule: str, seed: int) -> list[float]:
    """Train a dense run and return its validation accuracy after each epoch."""
    config = TrialConfig(
        workload="common_start:make", workload_options=(f"schedule={schedule}",), epochs=EPOCHS, seed=seed,
        method="none",
    )  # fmt: skip
    with TrainingRun(config) as run:
        found = []
        while not run.finished:
            found.append(float(run.train_epoch()["accuracy"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=100)
    arguments = parser.parse_args()
    print(header("benchmarks/common_luck.py"))
    for schedule in ("constant", "drops"):
        runs = np.array(
            [accuracies(schedule, seed) for seed in range(arguments.first, arguments.first + arguments.seeds)]
        )
        lucks = [loss_scale(run[-1], run, ACCURACY, 0.005).luck for run in runs]
        print(f"{schedule}: accuracy {runs[:, -1].mean():.4f}, deviates by {100 * runs[:, -1].std():.2f} points")
        for epochs in LENGTHS:
            at, end = runs[:, epochs - 1], runs[:, -1]
            ties = [luck_in_common(run[epochs - 1 :], luck) for run, luck in zip(runs, lucks, strict=True)]
            times = [deviation_of_state(run, epochs, luck) for run, luck in zip(runs, lucks, strict=True)]
            loss, within, alike = (end - at).mean(), np.mean(end - at <= 0.005), np.corrcoef(at, end)[0, 1]
            print(
                f"  {epochs} of {EPOCHS} epochs: loses {100 * loss:.2f} points, within half a point on "
                f"{100 * within:.0f} %; correlation {alike:.2f}, told {_quartiles(ties)}; deviates by "
                f"{at.std() / np.mean(lucks):.1f} times the luck, told {_quartiles(times)}",
                flush=True,
            )


def _quartiles(values: list[float]) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
