"""Improvements that an outcome promises, of the answer and of the front, and the least that is worth a training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from analysis.metrics.pareto import hypervolume, non_dominated

#: Expected improvement of the answer, or of the front, a fraction of the compute, below which no outcome is worth its
#: training; or this share of what they are, where that is less, but no less than the third.
WORTHWHILE, WORTHWHILE_AREA = 0.005, 0.01
#: Difference of the shares of a run that a layer trains below which the quality of two runs cannot be told apart: less
#: than an epoch of 30, whose effect the noise of a seed covers.
ALIKE = 0.02
_WORTHWHILE_SHARE, _LEAST_WORTHWHILE = 0.05, 0.001


def worthwhile(known: float, most: float) -> float:
    """Return the least expected improvement of what is known by now, ``most`` where there is much of it.

    >>> worthwhile(0.5, 0.01), worthwhile(0.06, 0.01), worthwhile(0.0, 0.01)
    (0.01, 0.003, 0.001)
    """
    return min(most, max(_WORTHWHILE_SHARE * known, _LEAST_WORTHWHILE))


def area_of(front: Sequence[tuple[float, float]], worst: float) -> float:
    """Return the mean saving of (loss, saving) points up to a loss ``worst``, gains counted as no loss.

    >>> area_of([(-0.1, 0.2), (0.5, 0.4), (2.0, 0.9), (float("inf"), 1.0)], 1.0)
    0.30000000000000004
    """
    points = np.array([(-max(loss, 0.0), saved) for loss, saved in front if loss < worst and saved > 0])
    return hypervolume(points[non_dominated(points)], (-worst, 0.0)) / worst if len(points) else 0.0


def answer_gained(
    saved: NDArray[np.float64], best: float, likely: NDArray[np.bool_], here: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (m,) expected improvements of the answer's saving; none by what is not likely enough to hold elsewhere.

    >>> answer_gained(np.array([0.5, 0.5, 0.2]), 0.25, np.array([True, False, True]), np.array([0.8, 1, 1])).tolist()
    [0.2, 0.0, 0.0]

    Args:
        saved: (m,) compute that candidates save.
        best: that of the answer so far.
        likely: (m,) whether they are sure enough to stay within the allowed loss on another seed.
        here: (m,) probabilities of staying within it on the study's own seed.
    """
    found: NDArray[np.float64] = np.where(likely, here, 0.0) * np.maximum(saved - best, 0.0)
    return found


def are_new(candidates: NDArray[np.float64], trained: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return (m,) whether candidates differ from every run by what can be told apart.

    Two runs of one length cannot if they save alike, to `WORTHWHILE`, and no layer trains longer by `ALIKE` in one.

    >>> trained = np.array([[0.502, 1.0, 0.4, 0.6]])
    >>> are_new(np.array([[0.501, 1.0, 0.41, 0.59], [0.501, 1.0, 0.3, 0.7], [0.501, 0.5, 0.4, 0.6]]), trained).tolist()
    [False, True, True]

    Args:
        candidates: (m, k + 2) features as in `quality_model`.
        trained: (n, k + 2).
    """
    least = np.array([WORTHWHILE, 1e-9, *[ALIKE] * (trained.shape[1] - 2)])
    found: NDArray[np.bool_] = np.array([(np.abs(trained - one) > least).any(axis=1).all() for one in candidates], bool)
    return found
