"""Savings counted in FLOPs beside savings on the clock, on digits: same run, layers stopped at a fifth of it.

    python benchmarks/clock_savings.py

Runs alternate between baseline and each setting; evaluation is not in the training time. Accuracies are of the test
split, over the seeds.
"""

from __future__ import annotations

import random
from statistics import mean

from machine import header, spread
from trainings import last_row

from trainables.config import TrialConfig

SEEDS = range(5)
#: Last stopped parameter: through conv1, conv2, ... and their norms.
STOPS = {"2 of 6 convolutions": 5, "4 of 6 convolutions": 11, "6 of 6 convolutions": 17}


def main() -> None:
    """Print the table."""
    random.seed(0)
    print(header("benchmarks/clock_savings.py"), f"| digits, 30 epochs, stopped at step 60 of 300, {len(SEEDS)} seeds")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ("baseline", *STOPS)}
    last_row(TrialConfig(method="none", epochs=3))
    for seed in SEEDS:
        order = list(rows)
        random.shuffle(order)
        for name in order:
            stop = {} if name == "baseline" else {"CAC_STOP_LAYER_NUM": (STOPS[name],), "CAC_STOP_LAYER_ITR": (59,)}
            method = "none" if name == "baseline" else "gradskip"
            rows[name].append(last_row(TrialConfig(method=method, seed=seed, **stop)))  # type: ignore[arg-type]
    baseline = rows["baseline"]
    print(f"{'':<22}{'FLOPs saved':>12}  training time saved (median, range){'':<14}  test accuracy, mean")
    for name, found in rows.items():
        time_saved = [1 - r["train_time_s"] / b["train_time_s"] for r, b in zip(found, baseline, strict=True)]
        accuracy = mean(r["test_quality"] for r in found)
        print(f"{name:<22}{found[0]['compute_saved']:>12.3f}  {spread(time_saved):<48}  {accuracy:.4f}")


if __name__ == "__main__":
    main()
