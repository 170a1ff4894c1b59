"""Standard deviation of one run's quality from seed to seed, in allowed losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from analysis.metrics.noise import resolution_of, seed_noise
from trainables.quality import Quality, allowed_amount


def luck_of_one_run(baseline: float, others: Sequence[float], quality: Quality, allowed_drop: float | str) -> float:
    """Return the standard deviation of a run's quality over seeds, in allowed losses; 1 where that is not known.

    Args:
        baseline: quality of the baseline.
        others: that of other runs, to infer how many samples it is measured on.
        quality: the metric, of which accuracy alone has a known deviation (`analysis.metrics.noise`).
        allowed_drop: that may be lost of it.
    """
    if not quality.is_accuracy:
        return 1.0
    noise = float(seed_noise(baseline, resolution_of(pd.Series([baseline, *others])))) / math.sqrt(2)  # of one, not two
    return noise / max(allowed_amount(allowed_drop, baseline), 1e-6) or 1.0
