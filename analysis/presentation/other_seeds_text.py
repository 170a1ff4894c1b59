"""Sentences on how probably a setting of one seed holds on others. Pure: rows in, text out."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import ROUNDING, percent, whole_percent
from analysis.metrics.other_seeds import is_unsure
from trainables.savings import SAVED


def one_seed(best: pd.Series) -> str:
    """Return the sentence on what one seed says of another."""
    holds = best.get("holds")
    if holds is None or pd.isna(holds):
        return "One seed, not confirmed."
    return f"One seed, not confirmed; on another it stays within that with a probability of {whole_percent(holds)}."


def less_sure(ranking: pd.DataFrame, saved: float, sure: float) -> str:
    """Return a sentence if a trial saves more than this that is not sure to hold on other seeds; empty otherwise."""
    others = ranking[ranking["within_drop"].astype(bool) & is_unsure(ranking, sure)]
    others = others[others[SAVED] > saved + ROUNDING]
    if others.empty:
        return ""
    first = others.iloc[0]
    alone = whole_percent(first["holds"])
    return f"Trial {first['trial']} saves {percent(first[SAVED])} here, but would hold elsewhere with {alone} alone."


def and_sure(best: pd.Series | None) -> str:
    """Return what a setting lacks beside being within the allowed loss, where probabilities are known; else nothing."""
    return "" if best is None or "holds" not in best.index else " and is sure enough to hold on another seed"
