"""Central differences on Rosenbrock's function: the laboratory's experiment, with a decaying and a constant epsilon.

    python benchmarks/rosenbrock.py [--seeds 3] [--scale 1] [--output rosenbrock.png]

N = 100 numbers in 50 pairs, a = 1, b = 100, a start of uniform random integers in [-10, 10], steps of length 0.1 and an
epsilon of 0.01; from 30,000 updates on both are a tenth every 10,000 updates, 80,000 in all. A second run keeps epsilon
at 0.01. --scale 10 makes everything but the numbers ten times shorter. A run takes about 80 seconds on one core.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import header, spread

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun

PAIRS, A, B, EPSILON = 50, 1.0, 100.0, 1e-2
DECAY_FROM, DECAY_EVERY, UPDATES = 30_000, 10_000, 80_000
#: Updates between two looks.
LOOK = 200


@dataclass(frozen=True, kw_only=True)
class Descent:
    """One run."""

    updates: list[int]
    """Updates at each look, from 0."""
    values: list[float]
    """Value of the function at each look."""
    distances: list[float]
    """Largest distance of a number from its optimum, 1, at each look."""
    numbers: dict[int, torch.Tensor]
    """All numbers, (N,), at the start, before the first decay and at the end, by updates."""

    def at(self, updates: int) -> tuple[float, float]:
        """Value and distance after so many updates."""
        place = self.updates.index(updates)
        return self.values[place], self.distances[place]


def descend(*, seed: int = 0, decays: bool = True, scale: int = 1, pairs: int = PAIRS) -> Descent:
    """Train the workload `rosenbrock` by central differences."""
    first, every, total = (number // scale for number in (DECAY_FROM, DECAY_EVERY, UPDATES))
    look = max(1, LOOK // scale)
    options = (f"pairs={pairs}", f"updates={look}", f"decay_from={first}", f"decay_every={every}")
    config = TrialConfig(
        workload="rosenbrock", workload_options=options, epochs=total // look, seed=seed, method="central_difference",
        gradient_epsilon=EPSILON, gradient_epsilon_decays=decays,
    )  # fmt: skip
    updates, values, distances, numbers = [], [], [], {}

    def note(run: TrainingRun) -> None:
        with torch.no_grad():
            x = run.model.get_parameter("x").clone()
            updates.append(run.step)
            values.append(float(run.model()))
            distances.append(float((x - A).abs().max()))
            if run.step in (0, first, total):
                numbers[run.step] = x

    with TrainingRun(config) as run:
        note(run)
        while not run.finished:
            run.train_epoch()
            note(run)
    return Descent(updates=updates, values=values, distances=distances, numbers=numbers)


def fixed_point(epsilon: float = EPSILON) -> float:
    """x_{2i-1} at which the central difference of this epsilon is zero."""
    return A / (1 + 2 * B * epsilon**2)


def draw_values(axes: Any, decaying: Descent, constant: Descent) -> None:
    """Draw the value over the updates, decays marked, and the value at the fixed point of the constant epsilon."""
    axes.semilogy(decaying.updates, decaying.values, label="epsilon decays with the learning rate")
    axes.semilogy(constant.updates, constant.values, label="epsilon stays 0.01", linestyle="--")
    pairs = len(decaying.numbers[0]) // 2
    stop = pairs * (fixed_point() - A) ** 2
    axes.axhline(stop, color="grey", linewidth=1, linestyle=":", label=f"fixed point of epsilon 0.01: {stop:.4f}")
    first, *_, end = sorted(decaying.numbers)[1:]
    for decay in range(first, end, (end - first) // 5):
        axes.axvline(decay, color="lightgrey", linewidth=0.8, zorder=0)
    axes.set(xlabel="updates (grey: learning rate times 0.1)", ylabel="value of Rosenbrock's function")
    axes.legend(fontsize=8)


def draw_numbers(axes: Any, found: Descent) -> None:
    """Draw all numbers at the start, before the first decay and at the end."""
    for updates, marker in zip(sorted(found.numbers), ("x", "o", "."), strict=True):
        x = found.numbers[updates]
        axes.plot(range(1, len(x) + 1), x, marker, markersize=4, linestyle="none", label=f"after {updates:,} updates")
    axes.set(xlabel="number", ylabel="x")
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    print(header("rosenbrock.py"), "| threads 1")
    runs = {decays: [descend(seed=seed, decays=decays, scale=arguments.scale) for seed in range(arguments.seeds)]
            for decays in (True, False)}  # fmt: skip
    for decays, found in runs.items():
        print(f"\nepsilon {'decays' if decays else 'stays'}: value, and largest |x - 1|, over {len(found)} seeds")
        for updates in range(DECAY_FROM, UPDATES + 1, DECAY_EVERY):
            values, distances = zip(*(run.at(updates // arguments.scale) for run in found), strict=True)
            print(f"  {updates:>6,}  value {spread(list(values))}   distance {spread(list(distances))}")
    print(f"\nfixed point of epsilon {EPSILON}: x = {fixed_point():.6f}, value {PAIRS * (fixed_point() - A) ** 2:.6f}")
    ends = [run.numbers[UPDATES // arguments.scale].view(-1, 2)[:, 0] for run in runs[False]]
    print("largest |x - fixed point| of the runs whose epsilon stays:",
          spread([float((x - fixed_point()).abs().max()) for x in ends]))  # fmt: skip
    if arguments.output:
        from matplotlib import pyplot

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        draw_values(left, runs[True][0], runs[False][0])
        draw_numbers(right, runs[True][0])
        figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
