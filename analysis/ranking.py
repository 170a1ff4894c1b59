"""Ranking: compute saved against accuracy lost."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.baseline import relative_to_baseline
from trainables.errors import UserError

#: Drops are differences of fractions such as 583/599; rounding must not turn "exactly the allowed drop" into more.
ROUNDING = 1e-9


def check_allowed_drop(allowed_drop: float) -> None:
    """Raise UserError unless it is a fraction in [0, 1)."""
    if not 0 <= allowed_drop < 1:
        raise UserError(
            f"the allowed drop must be a fraction in [0, 1), such as 0.005 for half a point, got {allowed_drop}"
        )


def pareto_front(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials that no other beats in both accuracy and compute saved (both maximised), in n log n.

    A trial is on the front unless another is at least as good in both and better in one; trials with equal values
    are on it together. Only completed trials count.

    Returns:
        The front, most compute saved first.
    """
    done = trials[trials["status"] == "completed"].dropna(subset=["accuracy", "compute_saved"])
    done = done.sort_values(["compute_saved", "accuracy"], ascending=False, kind="stable")
    saved, accuracy = done["compute_saved"].to_numpy(), done["accuracy"].to_numpy()
    if len(done) == 0:
        return done
    # In this order a trial is beaten by one that saves more and is as accurate, or saves the same and is more so.
    first_of_ties = np.r_[True, saved[1:] != saved[:-1]]
    tie_group = np.cumsum(first_of_ties) - 1
    group_best = accuracy[first_of_ties]
    best_before = np.r_[-np.inf, np.maximum.accumulate(group_best)[:-1]]
    on_front = (accuracy == group_best[tie_group]) & (accuracy > best_before[tie_group])
    return done[on_front]


def rank(trials: pd.DataFrame, *, allowed_drop: float = 0.005) -> pd.DataFrame:
    """The completed trials, best first.

    First those within the allowed drop by compute saved, then the others by their drop (smallest first). Ties go to
    the higher accuracy, then to the earlier trial. The baseline is ranked like any other: it saves nothing at no drop.

    Args:
        trials: one row a trial.
        allowed_drop: accuracy that may be lost against the baseline, a fraction in [0, 1).

    Returns:
        The trials with `rank` (from 1), `within_drop` and `on_front` in front of the other columns.

    Raises:
        UserError: the allowed drop is out of range.
    """
    check_allowed_drop(allowed_drop)
    done = relative_to_baseline(trials)
    done = done[done["status"] == "completed"].copy()
    done["within_drop"] = done["accuracy_drop"] <= allowed_drop + ROUNDING
    done["on_front"] = done.index.isin(pareto_front(done).index)
    order = np.lexsort(
        (
            done["trial"],
            -done["accuracy"],
            -done["compute_saved"].where(done["within_drop"], 0),
            done["accuracy_drop"].where(~done["within_drop"], 0),
            ~done["within_drop"],
        )
    )
    done = done.iloc[order]
    done.insert(0, "rank", np.arange(1, len(done) + 1))
    front = ["rank", "trial", "role", "within_drop", "on_front", "accuracy", "accuracy_drop", "compute_saved"]
    return done[front + [c for c in done.columns if c not in front]].reset_index(drop=True)


def best(ranking: pd.DataFrame) -> pd.Series | None:
    """The first of a ranking if it is within the allowed drop, else None."""
    if len(ranking) == 0 or not bool(ranking.iloc[0]["within_drop"]):
        return None
    return ranking.iloc[0]
