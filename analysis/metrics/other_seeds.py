"""Probability that a setting stays within the allowed loss on another seed, as a search told it (`StudyInfo.holds`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd


def with_holds(ranking: pd.DataFrame, holds: Mapping[str, float]) -> pd.DataFrame:
    """Return a ranking with the probability of each trial to stay within the allowed loss on another seed, if known.

    Args:
        ranking: from `analysis.rank`.
        holds: the probabilities by the trials' numbers (`StudyInfo.holds`); empty for a ranking as it is.
    """
    if not holds:
        return ranking
    return ranking.assign(holds=ranking["trial"].astype(int).astype(str).map(dict(holds)).astype(float))


def is_unsure(ranking: pd.DataFrame, sure: float) -> pd.Series[bool]:
    """Return whether each trial is known to hold on another seed with less than a probability."""
    return is_less(ranking["holds"], sure) if "holds" in ranking.columns else pd.Series(False, index=ranking.index)


def is_less(holds: Any, sure: float) -> Any:
    """Return whether probabilities of holding are below a wanted one, but for rounding.

    >>> is_less(pd.Series([0.4999996, 0.49]), 0.5).tolist()
    [False, True]
    """
    return holds < sure - 1e-6
