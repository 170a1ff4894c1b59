"""Formulas of what a run saves, and the kinds of compute that a study can rank by. Without torch.

Symbols: T compute saved in training (`compute_saved`), I compute saved in inference (`inference_saved`), S training
time saved (`time_saved`); fractions, at most 1, negative where more was executed than without the method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Column of the saving that a study ranks by (`ranked_saving`).
SAVED = "saved"
TRAINING, INFERENCE, BOTH, TIME = "training", "inference", "both", "time"


#: By saving: the function of T, I and S that ranks, the words for the compute in a sentence such as "you can skip 31 %
#: of ...", and those for the saving in a heading, an axis label or a line of numbers.
_SAVINGS: dict[str, tuple[Callable[[Any, Any, Any], Any], str, str]] = {
    TRAINING: (lambda t, i, s: t, "the training compute", "compute saved"),
    INFERENCE: (lambda t, i, s: i, "the inference compute", "inference compute saved"),
    BOTH: (
        lambda t, i, s: (t + i) / 2,
        "training and inference compute, on average",
        "mean of training and inference saved",
    ),
    TIME: (lambda t, i, s: s, "the training time", "training time saved"),
}
#: Savings by which trials can be ranked.
SAVINGS = tuple(_SAVINGS)


def share_saved(executed: Any, dense: Any) -> Any:
    """Return the share of a dense run's cost that was not executed; 0 for a dense run without cost (NaN in a Series).

    The costs are FLOPs, bytes, seconds or multiply-adds, as numbers or as pandas Series.

    >>> share_saved(60, 100)
    0.4
    """
    if isinstance(dense, (int, float)) and not dense:
        return 0.0
    return 1 - executed / dense


def share_of_budget(spared: Any, budget: float) -> Any:
    """Return the spared cost of the executed steps (dense minus executed) as a share of the full dense run's.

    What was not executed yet counts as dense, so a run that is cut short saves nothing by that.

    >>> share_of_budget(20, 100), share_of_budget(0, 0)
    (0.2, 0.0)
    """
    return spared / budget if budget else 0.0 * spared


def ranked_saving(saving: str | None, training: Any, inference: Any, time: Any = float("nan")) -> Any:
    """Return what a study with this saving (None: training) ranks by: T, I, (T + I) / 2 or S, numbers or Series.

    >>> [round(ranked_saving(saving, 0.2, 0.6), 6) for saving in (None, "inference", "both")]
    [0.2, 0.6, 0.4]
    """
    return _SAVINGS[saving or TRAINING][0](training, inference, time)


def share_words(saving: str) -> str:
    """Return the words for the ranked compute in a sentence: ``the inference compute``."""
    return _SAVINGS[saving][1]


def saved_words(saving: str) -> str:
    """Return the words for the ranked saving in a heading, an axis label or a line of numbers: ``compute saved``."""
    return _SAVINGS[saving][2]
