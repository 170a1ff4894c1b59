"""Pareto front, hypervolume and knee of arrays of numbers. NumPy only; every column is to be maximised.

A row *dominates* another if it is at least as good in every column and better in one. Callers flip the sign of a
column that is to be minimised, and drop rows with missing values first: NaN is neither better nor worse than a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainables.errors import UserError

#: Pairs of rows compared in one array operation, at most.
_PAIRS = 1 << 20
#: Least height of a knee above the hyperplane, greater than rounding errors of scaled values.
_ROUNDING = 1e-9


def non_dominated(values: ArrayLike) -> NDArray[np.bool_]:
    """Return a mask of the rows that no other row dominates; equal rows are on the front together.

    One and two columns take n log n, more of them a comparison of all rows with those of the front.

    Args:
        values: (N, M) numbers, M >= 1, infinities allowed.

    Raises:
        UserError: the shape is not (N, M), or a value is NaN.

    >>> non_dominated([[1, 2], [2, 1], [1, 1], [2, 1]]).tolist()
    [True, True, False, True]
    """
    array = _table(values)
    if len(array) == 0:
        return np.zeros(0, dtype=bool)
    # Ascending by the first column, ties by the second and so on: only a later row can dominate an earlier one.
    distinct, place = np.unique(array, axis=0, return_inverse=True)
    ordered = distinct[::-1]
    if array.shape[1] <= 2:
        best_before = np.r_[-np.inf, np.maximum.accumulate(ordered[:-1, -1])]
        front = ordered[:, -1] > best_before
        front[0] = True  # also where its last value is -inf
    else:
        front = _front_by_pairs(ordered[:, 1:])
    return front[::-1][place.reshape(-1)]


def _front_by_pairs(ordered: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of (n, k) rows no earlier row equals or exceeds in every column."""
    front: NDArray[np.bool_] = np.zeros(len(ordered), dtype=bool)
    rows = max(1, _PAIRS // len(ordered))
    for begin in range(0, len(ordered), rows):
        block = ordered[begin : begin + rows]
        # What an earlier row off the front covers, the row that covers that one covers, too.
        earlier = ordered[:begin][front[:begin]]
        covered = np.any(np.all(earlier[:, None] >= block[None], axis=2), axis=0)
        within = np.tril(np.all(block[None] >= block[:, None], axis=2), -1).any(axis=1)
        front[begin : begin + len(block)] = ~(covered | within)
    return front


def hypervolume(values: ArrayLike, reference: ArrayLike) -> float:
    """Compute the exact volume that the rows dominate above a reference point, in the product of the columns' units.

    Two columns take a sweep; more are cut along the last column, and from each slice the part that better rows cover is
    subtracted (While, Bradstreet and Barone 2012, "A fast way of calculating exact hypervolumes").

    Args:
        values: (N, M) finite numbers, M >= 1, in any order, with or without dominated rows.
        reference: (M,) finite numbers. A row that is not better than it in every column adds nothing.

    Raises:
        UserError: the shapes do not fit, or a number is not finite.

    >>> hypervolume([[3, 1], [1, 2]], [0, 0])
    4.0
    """
    array, point = _table(values), np.asarray(reference, dtype=float)
    if point.shape != array.shape[1:]:
        raise UserError(
            f"the reference must hold one number for each of the {array.shape[1]} columns, got shape {point.shape}"
        )
    if not (np.isfinite(array).all() and np.isfinite(point).all()):
        raise UserError(
            "the hypervolume needs finite numbers: drop rows with infinite ones, and choose the reference so"
        )
    return _volume(array[(array > point).all(axis=1)] - point)


def _volume(above: NDArray[np.float64]) -> float:
    """Compute the volume between (n, M) rows of positive numbers and the origin."""
    if len(above) == 0:
        return 0.0
    if above.shape[1] == 1:
        return float(above.max())
    if above.shape[1] == 2:
        width, height = above[np.lexsort((-above[:, 1], -above[:, 0]))].T
        return float(np.sum(width * np.diff(np.maximum.accumulate(height), prepend=0.0)))
    front = np.unique(above[non_dominated(above)], axis=0)
    front = front[np.argsort(front[:, -1], kind="stable")]  # the lowest slice first: every later one covers its height
    total = 0.0
    for place, row in enumerate(front):
        shadows = np.minimum(front[place + 1 :, :-1], row[:-1])
        total += row[-1] * (float(np.prod(row[:-1])) - _volume(shadows))
    return total


def knee(values: ArrayLike) -> int | None:
    """Return the number of the knee: the row of the front farthest above the line between its ends.

    Each column is scaled to [0, 1] over the front. The knee is the row farthest above the hyperplane through the scaled
    corners (1, 0, ...), (0, 1, ...), ..., that is, the one with the greatest sum; with two columns this is the knee of
    Das 1999, "On characterizing the knee of the Pareto curve".

    Args:
        values: (N, M) finite numbers.

    Returns:
        Number of the row, the first of equals; None if the front has fewer than 3 distinct rows, or none above the
        hyperplane (a front that is straight or curved inwards).

    Raises:
        UserError: the shape is not (N, M), or a number is not finite.

    >>> knee([[0, 10], [6, 9], [10, 0], [3, 3]])
    1
    """
    array = _table(values)
    if not np.isfinite(array).all():
        raise UserError("the knee needs finite numbers: drop rows with infinite ones")
    places = np.flatnonzero(non_dominated(array))
    front = array[places]
    if len(np.unique(front, axis=0)) < 3:
        return None
    span = np.ptp(front, axis=0)
    # A column with equal values over the whole front distinguishes no rows.
    scaled = (front - front.min(axis=0)) / np.where(span > 0, span, 1)
    above = scaled.sum(axis=1) - 1
    if above.max() <= _ROUNDING:
        return None
    return int(places[np.argmax(above >= above.max() - _ROUNDING)])


def _table(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or array.shape[1] == 0:
        raise UserError(f"the values must be a table of rows and at least one column, got shape {array.shape}")
    missing = np.isnan(array).any(axis=1)
    if missing.any():
        raise UserError(f"{missing.sum()} of {len(array)} rows hold NaN, which cannot be compared: drop them first")
    return array
