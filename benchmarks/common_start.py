"""Measure what cut runs cost that begin as the full run does, by learning-rate schedule.

    python benchmarks/common_start.py [--seeds 3] [--concurrency 2]

The default search runs on the digits under a constant learning rate, under drops at fixed epochs, and under a cosine
over the whole run. A line a search: what its dense runs of fewer epochs would have executed alone and what they did, in
full trainings; the same of the whole search; and what its answer saves. Then the medians by schedule.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from machine import header
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, MultiStepLR

import analysis
from analysis.io.layout import Layout
from analysis.metrics.controls import SHORTER
from trainables.workloads.digits import Digits

EPOCHS = 30
#: Epochs after which the learning rate drops to a tenth.
DROPS = (18, 25)


def _schedule(name: str, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    if name == "constant":
        return ConstantLR(optimizer, factor=1.0)
    if name == "drops":
        return MultiStepLR(optimizer, [Digits().steps_per_epoch * epoch for epoch in DROPS], gamma=0.1)
    return CosineAnnealingLR(optimizer, T_max=total_steps)


def make(schedule: str) -> dict[str, Any]:
    """Return the parts of the workload ``digits`` with one of the schedules."""
    digits = Digits()
    return {
        "model": digits.make_model,
        "train": digits.train_batches,
        "validation": list(digits.evaluation_batches("validation")),
        "test": list(digits.evaluation_batches("test")),
        "optimizer": digits.make_optimizer,
        "schedule": lambda optimizer, total_steps: _schedule(schedule, optimizer, total_steps),
        "steps_per_epoch": digits.steps_per_epoch,
        "epochs": EPOCHS,
    }


def searched(folder: Path, schedule: str, seed: int, concurrency: int) -> tuple[float, float, float, float, float]:
    """Search and return the cost alone and in fact of its cut dense runs, those of the search, and the answer's saving.

    Costs are in full trainings, the saving is a fraction.
    """
    name = f"{schedule}-{seed}"
    subprocess.run(
        [sys.executable, "-m", "tune_cac", "search", "--workload", "common_start:make", "--option",
         f"schedule={schedule}", "--seed", str(seed), "--concurrency", str(concurrency), "--name", name],
        cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": _with_this_folder()},
    )  # fmt: skip
    trials = analysis.load(Layout(folder / "results" / name).root)
    full = trials.iloc[0]["executed_flops"]
    cut, cost = trials[trials["control"] == SHORTER], analysis.search_cost(trials)
    ranked = analysis.rank(trials)
    saved = max(ranked.loc[ranked["within_drop"], "compute_saved"], default=0.0)
    return (
        cut["executed_flops"].sum() / full,
        cut["search_flops"].sum() / full,
        cost.own_equivalents,
        cost.dense_equivalents,
        saved,
    )


def _with_this_folder() -> str:
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=2)
    given = parser.parse_args()
    print(header("benchmarks/common_start.py"))
    print("schedule  seed  cut runs alone, executed  search alone, executed  most saved within the allowed loss")
    with tempfile.TemporaryDirectory() as folder:
        for schedule in ("constant", "drops", "cosine"):
            found = [searched(Path(folder), schedule, seed, given.concurrency) for seed in range(given.seeds)]
            for seed, row in enumerate(found):
                print(f"{schedule:9} {seed:4}  " + _line(row), flush=True)
            print(
                f"{schedule:9}  all  " + _line(tuple(median(column) for column in zip(*found, strict=True))), flush=True
            )


def _line(row: tuple[float, ...]) -> str:
    cut_alone, cut, alone, executed, saved = row
    return f"{cut_alone:14.2f} {cut:9.2f} {alone:14.2f} {executed:9.2f} {saved:14.1%}"


if __name__ == "__main__":
    main()
