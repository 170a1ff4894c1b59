"""Scale of losses of quality: what may be lost, what can be told apart, and how far the luck of one seed goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.metrics.noise import resolution_of, seed_noise
from trainables.quality import Quality, allowed_amount

#: The unit of losses is at least this share of one run's luck, or of the baseline's value where that is not known: an
#: allowed loss far below tells nothing of how large losses are.
_SHARE_OF_LUCK, _SHARE_OF_VALUE = 0.5, 0.001
#: The least unit.
_LEAST = 1e-12


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Losses on one split against one baseline, in the metric's unit."""

    allowed: float
    """Loss that is allowed."""
    limit: float
    """Smooth loss up to which a run counts as within it (`limit_between_counts`)."""
    luck: float
    """Standard deviation of a run's quality over seeds; `unit` where that is not known."""
    unit: float
    """Usual loss, which the model of the quality counts in: the allowed one, unless that is too small; > 0."""

    @property
    def within(self) -> float:
        """Return the loss up to which a smooth loss on another seed counts as within the allowed one.

        That is the limit where half a sample more than may be lost is above the allowed loss. Below it the allowed loss
        is: what was measured on fresh seeds held more often than it was said to (docs/findings.md).
        """
        return max(self.allowed, self.limit)

    @property
    def luck_in_units(self) -> float:
        """Return the luck in units."""
        return self.luck / self.unit


def loss_scale(baseline: float, others: Sequence[float], quality: Quality, allowed_drop: float | str) -> LossScale:
    """Return the scale of losses against a baseline.

    Args:
        baseline: its quality.
        others: that of other runs, to infer how many samples it is measured on.
        quality: the metric, of which accuracy alone has a known deviation (`analysis.metrics.noise`).
        allowed_drop: that may be lost of it (`trainables.quality`).
    """
    allowed, values = float(allowed_amount(allowed_drop, baseline)), [baseline, *others]
    luck = 0.0
    if quality.is_accuracy:
        luck = float(seed_noise(baseline, resolution_of(pd.Series(values)))) / math.sqrt(2)  # of one run, not of two
    unit = max(allowed, _SHARE_OF_LUCK * luck or _SHARE_OF_VALUE * abs(baseline), _LEAST)
    limit = limit_between_counts(allowed, values, quality)
    return LossScale(allowed=allowed, limit=limit, luck=luck or unit, unit=unit)


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
