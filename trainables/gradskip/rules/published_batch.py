"""The published auto rule (`published.AutoRule`) for many settings at once, over a layer's recorded variances.

Settings that examine a target at the same iterations read the same values: one curve of ratios and peak updates serves
all of them, and the stop of each threshold is found in it by bisection. Replay and the report's picture use it; a test
holds it equal to the state machine, one step after the other.

Symbols as in `published`: v variance, peak, count, ratio. Shapes: n settings, T steps, J examinations of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainables.gradskip.rules.published import next_examination

#: Names of the conditions under which a target stops, by index.
CONDITIONS = ("start", "mountain", "slope")
_START, _MOUNTAIN, _SLOPE = range(3)
_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class AutoNumbers:
    """Numbers of the auto rule for n settings."""

    start_itr: NDArray[np.int64]  # (n,) first iteration of an examination
    start_thr: NDArray[np.float64]  # (n,) threshold of the first target
    mt_count_thr: NDArray[np.int64]  # (n,) peak updates above which a later target is a mountain
    mt_thr: NDArray[np.float64]  # (n,) threshold of a mountain
    slope_thr: NDArray[np.float64]  # (n,) threshold of a slope
    interval: NDArray[np.int64]  # (n,) iterations between examinations
    braking: NDArray[np.int64]  # (n,) braking distance

    def rounded(self, *, single_precision: bool) -> AutoNumbers:
        """Return the numbers with thresholds in the precision in which the rule compares; see `AutoRule`."""
        start, mountain, slope = (_rounded(t, single_precision) for t in (self.start_thr, self.mt_thr, self.slope_thr))
        return replace(self, start_thr=start, mt_thr=mountain, slope_thr=slope)


def examinations(
    *, begin: int, end: int, start_itr: int, interval: int, anchor: int | None = None
) -> NDArray[np.int64]:
    """Return the iterations from ``begin`` to before ``end`` at which a target's variance is read, ascending.

    ``anchor`` is the iteration of the stop that made the target current and set its first peak; None for the first one.
    """
    regular = np.arange(next_examination(max(begin, start_itr), interval), end, interval, dtype=np.int64)
    return regular if anchor is None or anchor >= end else np.concatenate([[anchor], regular])


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values of one target at its examinations, whose peak is reset at the first of them."""

    iterations: NDArray[np.int64]  # (J,) examined iterations, ascending
    ratios: NDArray[np.float64]
    """(J,) variance over peak, rounded as in the rule; infinite where no stop is possible (a new peak, a NaN)."""
    counts: NDArray[np.int64]  # (J,) peak updates up to and including each examination

    @classmethod
    def of(cls, iterations: NDArray[np.int64], variances: NDArray[np.float64], *, single_precision: bool) -> Curve:
        """Compute the curve of variances read at these iterations; see `AutoRule` for ``single_precision``."""
        before = np.fmax.accumulate(np.concatenate([np.zeros(1), variances]))[:-1]  # a NaN does not count as a peak
        updates = variances >= before
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = _rounded(variances / before, single_precision)
        ratios[updates | ~(ratios < np.inf)] = np.inf
        return cls(iterations=iterations, ratios=ratios, counts=np.cumsum(updates))

    def stops(
        self, numbers: AutoNumbers, rows: NDArray[np.int64] | slice = _ALL, *, first: bool, single_precision: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find where each of n settings stops this target, the first one or a later one; ``rows`` selects settings.

        Returns (n,) index of the stop in the curve, its length for none, and (n,) index of the condition in
        `CONDITIONS`. ``single_precision`` as in `of`; False for numbers that are rounded already.
        """
        if first:
            start = _rounded(numbers.start_thr[rows], single_precision)
            return _first_below(self.ratios, start), np.full(len(start), _START)
        mountain, slope = (_rounded(values[rows], single_precision) for values in (numbers.mt_thr, numbers.slope_thr))
        # The count never decreases, so a target is a slope up to some index and a mountain from there on.
        turns = np.searchsorted(self.counts, numbers.mt_count_thr[rows], side="right")
        places, conditions = _first_below(self.ratios, slope), np.full(len(slope), _SLOPE)
        late = places >= turns
        for turn in np.unique(turns[late]):
            those = late & (turns == turn)
            places[those] = turn + _first_below(self.ratios[turn:], mountain[those])
            conditions[those] = _MOUNTAIN
        return places, conditions


def _rounded(values: NDArray[np.float64], single_precision: bool) -> NDArray[np.float64]:
    if not single_precision:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def _first_below(ratios: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the first ratio below each threshold; ``len(ratios)`` where there is none."""
    return np.searchsorted(-np.minimum.accumulate(ratios), -thresholds, side="right")
