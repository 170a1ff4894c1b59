"""Measure the change of an accuracy by another seed, beside the estimate used against shorter training.

    python benchmarks/seed_noise.py [--seeds 12]

Dense trainings of digits over 30, 27, 24, 21 and 18 epochs. Printed: the standard deviation over seeds of each
accuracy, and of the difference between the full and each shorter training of the same seed; and
`analysis.metrics.noise.seed_noise`.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import pandas as pd
from clock_savings import run
from machine import header

from analysis.metrics.noise import resolution_of, seed_noise
from trainables.config import TrialConfig

EPOCHS = (30, 27, 24, 21, 18)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="seeds of each length (default: 12)")
    seeds = parser.parse_args().seeds
    print(header("benchmarks/seed_noise.py"), f"| digits, {seeds} seeds")
    rows = {
        epochs: [run(TrialConfig(method="none", epochs=epochs, seed=seed)) for seed in range(seeds)]
        for epochs in EPOCHS
    }
    for split in ("accuracy", "test_accuracy"):
        found = {epochs: [row[split] for row in rows[epochs]] for epochs in EPOCHS}
        resolution = resolution_of(pd.Series([value for values in found.values() for value in values]))
        print(f"{split}, one sample {resolution:.5f}")
        for epochs, values in found.items():
            differences = [full - own for full, own in zip(found[EPOCHS[0]], values, strict=True)]
            estimate = float(seed_noise(mean(values), resolution))
            print(
                f"  {epochs} epochs: mean {mean(values):.4f}, deviation {stdev(values):.4f}; of the difference "
                f"{stdev(differences):.4f}, estimated {estimate:.4f}"
            )


if __name__ == "__main__":
    main()
