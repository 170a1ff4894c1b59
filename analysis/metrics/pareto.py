"""Pareto front of two columns of numbers, and the area below it. NumPy only; both are to be maximised.

A row *dominates* another if it is at least as good in both columns and better in one. Callers flip the sign of a column
that is to be minimised, and drop rows with missing values first: NaN is neither better nor worse than a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def non_dominated(values: ArrayLike) -> NDArray[np.bool_]:
    """Return a mask of the (N, 2) rows that no other row dominates; equal rows are on the front together.

    >>> non_dominated([[1, 2], [2, 1], [1, 1], [2, 1]]).tolist()
    [True, True, False, True]
    """
    array = np.asarray(values, dtype=float).reshape(-1, 2)
    if len(array) == 0:
        return np.zeros(0, dtype=bool)
    # Ascending by the first column, ties by the second: only a later row can dominate an earlier one.
    distinct, place = np.unique(array, axis=0, return_inverse=True)
    second = distinct[::-1, 1]
    front = second > np.r_[-np.inf, np.maximum.accumulate(second[:-1])]
    front[0] = True  # also where its last value is -inf
    return front[::-1][place.reshape(-1)]


def hypervolume(values: ArrayLike, reference: ArrayLike) -> float:
    """Compute the area that (N, 2) rows dominate above a reference point (2,), in the product of the columns' units.

    A row that is not better than the reference in both columns adds nothing.

    >>> hypervolume([[3, 1], [1, 2]], [0, 0])
    4.0
    """
    above = np.asarray(values, dtype=float).reshape(-1, 2) - np.asarray(reference, dtype=float)
    above = above[(above > 0).all(axis=1)]
    width, height = above[np.lexsort((-above[:, 1], -above[:, 0]))].T
    return float(np.sum(width * np.diff(np.maximum.accumulate(height), prepend=0.0)))
