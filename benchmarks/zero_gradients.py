"""Zero gradients: what leaving samples out of the backward pass saves, and what it costs in accuracy.

    python benchmarks/zero_gradients.py [--seeds 5] [--epochs 30] [--thresholds 0.01,0.03,0.1,0.3]
        [--workload images --option data=PATH --option ...]

Whole trainings of a workload with each threshold, biased and unbiased, beside plain training of the same seed. Printed:
FLOPs saved in all and in the backward pass, change of the validation accuracy in points, and the time of the training
relative to plain training's (each seed's own, one after the other); median and range over seeds.
"""

from __future__ import annotations

import argparse
from typing import Any

from machine import header, spread
from trainings import last_row

from trainables.config import TrialConfig


def compared(plain: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Return a line of savings and losses against plain training."""
    pairs = list(zip(plain, rows, strict=True))
    return (
        f"saved {spread([100 * r['compute_saved'] for r in rows])} %, "
        f"of the backward pass {spread([100 * r['backward_saved'] for r in rows])} %, "
        f"accuracy {spread([100 * (r['quality'] - p['quality']) for p, r in pairs])} points, "
        f"time {spread([r['train_time_s'] / p['train_time_s'] for p, r in pairs])} of plain"
    )


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--thresholds", default="0.01,0.03,0.1,0.3")
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--option", action="append", default=[])
    arguments = parser.parse_args()
    print(header("zero_gradients.py"))
    common = {
        "workload": arguments.workload,
        "workload_options": tuple(arguments.option) or None,
        "epochs": arguments.epochs,
    }
    last_row(TrialConfig(**{**common, "epochs": 1}))  # what the first training of a process does once
    plain = [last_row(TrialConfig(**common, method="none", seed=seed)) for seed in range(arguments.seeds)]
    print(f"plain: accuracy {spread([100 * row['quality'] for row in plain])} %")
    for threshold in map(float, arguments.thresholds.split(",")):
        for unbiased in (False, True):
            rows = [
                last_row(
                    TrialConfig(
                        **common, method="zero_gradients", seed=s, zero_threshold=threshold, zero_unbiased=unbiased
                    )
                )
                for s in range(arguments.seeds)
            ]
            kind = "unbiased" if unbiased else "biased"
            print(f"threshold {threshold:g}, {kind}: {compared(plain, rows)}", flush=True)


if __name__ == "__main__":
    main()
