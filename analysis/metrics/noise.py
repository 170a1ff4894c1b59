"""Estimates of the insignificant difference of two accuracies: one sample, and the seed noise. Pure.

Symbols: n samples of a split, e share of misclassified samples, a = 1 - e accuracy.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

#: Tolerance and largest denominator for each precision of accuracies, the finer first. A number that is not a count
#: matches a fraction within both by chance in one of some thousand cases. A value that float32 represents exactly gets
#: only the coarser precision: one of some hundred of these is exactly a fraction of 65,536.
_PRECISIONS = ((2.0**-44, 10**5), (2.0**-24, 10**6))
#: Most different accuracies that are evaluated; each takes about 0.1 ms.
_MOST_LOOKED_AT = 64


def resolution_of(accuracies: pd.Series[float]) -> float | None:
    """Infer the size of a split from accuracies, which are counts over it; return 1 / size, None where all are 0 or 1.

    The denominator of an accuracy as a reduced fraction is at most the split's size; the largest one is used. A size
    that is inferred too small makes intervals wider.
    """
    known = accuracies[np.isfinite(accuracies.astype("float64"))].unique()[:_MOST_LOOKED_AT]
    size = max((_denominator(float(value)) for value in known), default=1)
    return 1 / size if size > 1 else None


def _denominator(value: float) -> int:
    """Return the denominator of the simplest fraction that equals this number within the tolerance."""
    for precision, most in _PRECISIONS[1:] if float(np.float32(value)) == value else _PRECISIONS:
        for power in range(1, most.bit_length() + 1):
            found = Fraction(value).limit_denominator(min(2**power, most))
            if abs(float(found) - value) <= precision:
                return found.denominator
    return found.denominator


def is_constant(values: ArrayLike) -> bool:
    """Return whether all values are equal up to rounding, as 583/599 - 580/599 and 3/599; True for less than two.

    >>> is_constant([583 / 599 - 580 / 599, 3 / 599]), is_constant([0.1, 0.2])
    (True, False)
    """
    found = np.asarray(values, dtype=np.float64)
    return found.size == 0 or float(np.ptp(found)) <= 1e-12


def seed_noise(accuracy: Any, resolution: float | None) -> NDArray[np.float64]:
    """Estimate the standard deviation of the accuracy difference of two trainings that differ only in their seeds.

    If all samples had the same probability of error, the accuracy of one training would have the variance e (1 - e) /
    n, which is the upper bound. If ensembles are calibrated (among samples for which a share p of the networks predicts
    a class, a share p has that class), as is observed, it is e / 2n for two classes (Jordan 2023, "On the variance of
    neural network training with respect to test sets and distributions", arXiv 2304.01910). The variance of a
    difference is twice the smaller of the two. On digits that is .006; 12 seeds of five lengths gave .004 to .007.

    The accuracies may have any shape; without a resolution, 1 / n, it is 0.

    >>> seed_noise([0.975], 1 / 599).round(4).tolist()
    [0.0065]
    """
    wrong = 1 - np.asarray(accuracy, dtype=np.float64)
    per_sample = 2 * np.minimum(wrong / 2, wrong * (1 - wrong))
    return np.sqrt(np.clip(per_sample, 0, None) * (resolution or 0.0))
