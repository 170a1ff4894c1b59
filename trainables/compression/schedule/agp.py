"""The formula of automated gradual pruning. Without torch."""

from __future__ import annotations


def gradual_share(initial: float, final: float, progress: float) -> float:
    """Return s = s_f + (s_i - s_f) (1 - p)^3 (Zhu & Gupta 2017, eq. 1), p from 0 in the first active epoch to 1.

    >>> [round(gradual_share(0.05, 0.8, p), 4) for p in (0, 0.25, 0.5, 0.75, 1)]
    [0.05, 0.4836, 0.7063, 0.7883, 0.8]
    """
    left = (1 - progress) ** 3
    return left * initial + (1 - left) * final  # exact at both ends
