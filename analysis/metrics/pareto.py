"""Pareto front, hypervolume and knee of arrays of numbers. NumPy only; every column is to be maximised.

A row *dominates* another if it is at least as good in every column and better in one. Callers flip the sign of a
column that is to be minimised, and drop rows with missing values first: NaN is neither better nor worse than a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainables.errors import UserError

#: Pairs of rows compared in one array operation, at most; beyond it the rows are split.
_PAIRS = 1 << 18
#: Least height of a knee above the hyperplane, greater than rounding errors of scaled values.
_ROUNDING = 1e-9


def non_dominated(values: ArrayLike) -> NDArray[np.bool_]:
    """Return a mask of the rows that no other row dominates.

    Equal rows do not dominate each other, so they are on the front together. One and two columns take n log n by a
    sweep over the sorted rows. More columns take n (log n)^(M - 1) by divide and conquer (Kung, Luccio and Preparata
    1975, "On finding the maxima of a set of vectors"), whatever the share of rows on the front.

    Args:
        values: (N, M) numbers, M >= 1, infinities allowed.

    Returns:
        (N,) mask.

    Raises:
        UserError: the shape is not (N, M), or a value is NaN.

    >>> non_dominated([[1, 2], [2, 1], [1, 1], [2, 1]]).tolist()
    [True, True, False, True]
    """
    array = _table(values)
    rows, columns = array.shape
    if rows == 0:
        return np.zeros(0, dtype=bool)
    order = np.lexsort(-array.T[::-1])  # by the first column, ties by the second and so on, best first
    ordered = array[order]
    new = np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]
    distinct = ordered[new]
    front = np.zeros(len(distinct), dtype=bool)
    if columns == 1:
        front[0] = True
    elif columns == 2:
        # Earlier rows are at least as good in the first column, so only the second decides.
        best_before = np.r_[-np.inf, np.maximum.accumulate(distinct[:-1, 1])]
        front = distinct[:, 1] > best_before
        front[0] = True  # also where its second value is -inf
    else:
        front[_front_places(distinct)] = True
    mask = np.empty(rows, dtype=bool)
    mask[order] = front[np.cumsum(new) - 1]
    return mask


def hypervolume(values: ArrayLike, reference: ArrayLike) -> float:
    """Compute the exact volume that the rows dominate above a reference point.

    One and two columns take a sweep; more are cut along the last column, and from each slice the part that better rows
    cover is subtracted (While, Bradstreet and Barone 2012, "A fast way of calculating exact hypervolumes"). This takes
    about n^(M - 1) steps for n rows on the front: milliseconds for hundreds of rows and three columns.

    Args:
        values: (N, M) finite numbers, M >= 1, in any order, with or without dominated rows.
        reference: (M,) finite numbers. A row that is not better than it in every column adds nothing.

    Returns:
        The volume in the product of the columns' units, 0 if no row is better than the reference.

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
    above = array[(array > point).all(axis=1)] - point
    return _volume(above)


def knee(values: ArrayLike) -> int | None:
    """Return the number of the knee: the row of the front farthest above the line between its ends.

    Each column is scaled to [0, 1] over the front. The knee is the row farthest above the hyperplane through the
    scaled corners (1, 0, ...), (0, 1, ...), ...; with two columns these are the front's two ends and this is the knee
    of Das 1999, "On characterizing the knee of the Pareto curve". As its distance is proportional to the sum of the
    scaled columns, it is the row with the greatest sum. Where it lies depends on how far the front reaches.

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


def _front_places(distinct: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of the front of (n, M) distinct rows in descending lexicographic order.

    In this order a row can be dominated only by an earlier one, and the first column needs no comparison.
    """
    count = len(distinct)
    if count * count <= _PAIRS:
        return np.flatnonzero(~_covered_pairwise(distinct[:, 1:], distinct[:, 1:], earlier_only=True))
    half = count // 2
    first, second = _front_places(distinct[:half]), _front_places(distinct[half:]) + half
    return np.r_[first, second[~_covered(distinct[second, 1:], distinct[first, 1:])]]


def _covered(rows: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return (n,) which of the (n, k) rows are at most as good as one of (m, k) others in all k columns."""
    if len(rows) == 0 or len(by) == 0:
        return np.zeros(len(rows), dtype=bool)
    if rows.shape[1] == 1:
        return rows[:, 0] <= by[:, 0].max()
    if rows.shape[1] == 2:
        return _covered_in_the_plane(rows, by)
    if len(rows) * len(by) <= _PAIRS:
        return _covered_pairwise(rows, by)
    middle = np.partition(by[:, 0], len(by) // 2)[len(by) // 2]
    found = np.zeros(len(rows), dtype=bool)
    high = rows[:, 0] > middle
    found[high] = _covered(rows[high], by[by[:, 0] > middle])
    # The upper half of the others is at least as good as these in the first column, so the other columns decide.
    found[~high] = _covered(rows[~high, 1:], by[by[:, 0] >= middle, 1:])
    left = ~high & ~found
    found[left] = _covered(rows[left], by[by[:, 0] < middle])
    return found


def _covered_in_the_plane(rows: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.bool_]:
    order = np.argsort(-by[:, 0], kind="stable")
    best = np.r_[-np.inf, np.maximum.accumulate(by[order, 1])]  # best[i]: among the first i
    as_good = np.searchsorted(-by[order, 0], -rows[:, 0], side="right")
    return (as_good > 0) & (best[as_good] >= rows[:, 1])


def _covered_pairwise(
    rows: NDArray[np.float64], by: NDArray[np.float64], *, earlier_only: bool = False
) -> NDArray[np.bool_]:
    """Compute `_covered` by comparing every pair; with `earlier_only`, with rows of smaller index only."""
    covers = np.ones((len(rows), len(by)), dtype=bool)
    for row_values, by_values in zip(rows.T, by.T, strict=True):
        covers &= by_values >= row_values[:, None]
    if earlier_only:
        covers = np.tril(covers, -1)
    return np.any(covers, axis=1)


def _volume(above: NDArray[np.float64]) -> float:
    """Compute the volume between (n, M) rows of positive numbers and the origin."""
    if len(above) == 0:
        return 0.0
    if above.shape[1] == 1:
        return float(above.max())
    if above.shape[1] == 2:
        return _area(above)
    front = above[non_dominated(above)]
    front = np.unique(front, axis=0)
    front = front[np.argsort(front[:, -1], kind="stable")]  # the lowest slice first: every later one covers its height
    total = 0.0
    for place, row in enumerate(front):
        base, height = row[:-1], row[-1]
        shadows = np.minimum(front[place + 1 :, :-1], base)
        total += height * (float(np.prod(base)) - _volume(shadows))
    return total


def _area(above: NDArray[np.float64]) -> float:
    order = np.lexsort((-above[:, 1], -above[:, 0]))
    width, height = above[order, 0], above[order, 1]
    highest = np.maximum.accumulate(height)
    return float(np.sum(width * np.diff(highest, prepend=0.0)))
