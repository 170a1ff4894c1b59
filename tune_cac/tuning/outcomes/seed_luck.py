"""Luck of a run's quality on a split of so many samples, and the losses that can be told apart on it."""

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


def limit_between_counts(allowed: float, values: Sequence[float], quality: Quality) -> float:
    """Return the limit up to which a smooth loss counts as within the allowed one (continuity correction).

    Of 599 samples two may be lost at an allowed loss of 0.005 and three may not, so what is expected to lose three is
    not about half within; and where none may be lost, what is expected to lose none is within.

    >>> from trainables.quality import ACCURACY
    >>> round(599 * limit_between_counts(0.005, [583 / 599, 590 / 599], ACCURACY), 9)
    2.5

    Args:
        allowed: loss.
        values: the quality of runs, to infer how many samples it is measured on.
        quality: the metric; of others than accuracy all losses can be told apart.
    """
    one = resolution_of(pd.Series(list(values))) if quality.is_accuracy else None
    return allowed if one is None else (math.floor(allowed / one + 1e-9) + 0.5) * one
