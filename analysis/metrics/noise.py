"""Estimate the difference of two accuracies that means nothing: one sample, and the change by another seed. Pure.

Symbols: n samples of a split, e share of them that is wrong, a = 1 - e accuracy.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

#: Precisions in which accuracies are computed, the finer first, and the most samples that each can tell apart: a number
#: that is no count comes so near to a fraction of so many by chance in one of some thousand cases. One that has no more
#: bits than the coarser is of that: among some hundred of these one is a fraction of 65,536, exactly.
_PRECISIONS = ((2.0**-44, 10**5), (2.0**-24, 10**6))
#: Different accuracies that are looked at; each takes about a tenth of a millisecond.
_MOST_LOOKED_AT = 64


def resolution_of(accuracies: pd.Series[float]) -> float | None:
    """One sample of a split, or a little more, read off accuracies that are counts over it.

    Each is a reduced fraction of the split's size, so that its denominator is no greater than the size. The greatest
    is taken. Accuracies that were computed in float32 tell sizes up to some thousand. A size that is read too small
    makes an interval wider.

    Returns:
        1 / that number; None where all accuracies are 0 or 1.
    """
    known = accuracies[np.isfinite(accuracies.astype("float64"))].unique()[:_MOST_LOOKED_AT]
    size = max((_denominator(float(value)) for value in known), default=1)
    return 1 / size if size > 1 else None


def _denominator(value: float) -> int:
    """Of the simplest fraction that is this number, or nearly."""
    for precision, most in _PRECISIONS[1:] if float(np.float32(value)) == value else _PRECISIONS:
        for power in range(1, most.bit_length() + 1):
            found = Fraction(value).limit_denominator(min(2**power, most))
            if abs(float(found) - value) <= precision:
                return found.denominator
    return found.denominator


def is_constant(values: ArrayLike) -> bool:
    """Return whether all values are equal up to rounding, as are 583/599 - 580/599 and 3/599; so are none, and one.

    >>> is_constant([583 / 599 - 580 / 599, 3 / 599]), is_constant([0.1, 0.2])
    (True, False)
    """
    found = np.asarray(values, dtype=np.float64)
    return found.size == 0 or float(np.ptp(found)) <= 1e-12


def seed_noise(accuracy: Any, resolution: float | None) -> NDArray[np.float64]:
    """Standard deviation of the difference of two trainings of such accuracies that differ in their seeds alone.

    Two networks trained alike are wrong on other samples. Were every sample's chance to be wrong the same, the
    accuracy of one training would have the variance e (1 - e) / n, which is the most that it can be; where the share of
    networks that choose a class is the share of samples of that class among such, as is found of ensembles, it is
    e / 2n for two classes (Jordan 2023, "On the variance of neural network training with respect to test sets and
    distributions", arXiv 2304.01910). The smaller of the two, twice, is the variance of a difference. Measured beside
    this on the workload digits: ``benchmarks/seed_noise.py``.

    Args:
        accuracy: fractions, of any shape.
        resolution: 1 / n; None where it is not known, which gives 0.

    >>> seed_noise([0.975], 1 / 599).round(4).tolist()
    [0.0065]
    """
    wrong = 1 - np.asarray(accuracy, dtype=np.float64)
    per_sample = 2 * np.minimum(wrong / 2, wrong * (1 - wrong))
    return np.sqrt(np.clip(per_sample, 0, None) * (resolution or 0.0))
