"""Formulas of what a run saves, and the kinds of compute that a study can rank by. Without torch.

Symbols: T compute saved in training (`compute_saved`), I compute saved in inference (`inference_saved`), S training
time saved (`time_saved`); fractions, at most 1, negative where more was executed than without the method.

| saving | ranked by |
|---|---|
| ``training``, or None | T |
| ``inference`` | I |
| ``both`` | (T + I) / 2 |
| ``time`` | S |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Column of the saving that a study ranks by (`ranked_saving`).
SAVED = "saved"
TRAINING, INFERENCE, BOTH, TIME = "training", "inference", "both", "time"


@dataclass(frozen=True, kw_only=True)
class _Saving:
    rank: Callable[[Any, Any, Any], Any]
    """Function of T, I and S."""
    share_words: str
    """Words for the compute in a sentence such as "you can skip 31 % of ..."."""
    saved_words: str
    """Words for the saving in a heading, an axis label or a line of numbers."""


_SAVINGS = {
    TRAINING: _Saving(rank=lambda t, i, s: t, share_words="the training compute", saved_words="compute saved"),
    INFERENCE: _Saving(
        rank=lambda t, i, s: i, share_words="the inference compute", saved_words="inference compute saved"
    ),
    BOTH: _Saving(
        rank=lambda t, i, s: (t + i) / 2,
        share_words="training and inference compute, on average",
        saved_words="mean of training and inference saved",
    ),
    TIME: _Saving(rank=lambda t, i, s: s, share_words="the training time", saved_words="training time saved"),
}
#: Savings by which trials can be ranked.
SAVINGS = tuple(_SAVINGS)


def share_saved(executed: Any, dense: Any) -> Any:
    """Return the share of a dense run's cost that was not executed; 0 for a dense run without cost.

    Args:
        executed: FLOPs, bytes, seconds or multiply-adds of the run; a number or a pandas Series.
        dense: the same of the run without a method; NaN instead of 0 in a Series.

    >>> share_saved(60, 100)
    0.4
    """
    if isinstance(dense, (int, float)) and not dense:
        return 0.0
    return 1 - executed / dense


def share_of_budget(spared: Any, budget: float) -> Any:
    """Return spared cost as a share of the full budget; what was not executed yet counts as dense.

    For a complete run this is `share_saved` of its executed cost, computed from exact integers. A run that is cut
    short saves nothing by that.

    Args:
        spared: dense minus executed cost of the steps that were executed; a number or an array.
        budget: cost of all steps of the dense run.

    >>> share_of_budget(20, 100), share_of_budget(0, 0)
    (0.2, 0.0)
    """
    return spared / budget if budget else 0.0 * spared


def ranked_saving(saving: str | None, training: Any, inference: Any, time: Any = float("nan")) -> Any:
    """Return what a study with this saving ranks by.

    Args:
        saving: one of `SAVINGS`, or None for training.
        training: T; a number or a Series.
        inference: I, likewise; not read for training.
        time: S, likewise; read for time alone.

    >>> [round(ranked_saving(saving, 0.2, 0.6), 6) for saving in (None, "inference", "both")]
    [0.2, 0.6, 0.4]
    """
    return _SAVINGS[saving or TRAINING].rank(training, inference, time)


def objectives_of(saving: str, quality: str = "accuracy") -> tuple[str, str]:
    """Return the columns of a study's objectives: its metric and its saving.

    >>> objectives_of("training"), objectives_of("both")
    (('accuracy', 'compute_saved'), ('accuracy', 'saved'))
    """
    return (quality, "compute_saved" if saving == TRAINING else SAVED)


def share_words(saving: str) -> str:
    """Return the words for the ranked compute in a sentence such as "you can skip 31 % of ...".

    >>> share_words("inference")
    'the inference compute'
    """
    return _SAVINGS[saving].share_words


def saved_words(saving: str) -> str:
    """Return the words for the ranked saving in a heading, an axis label or a line of numbers.

    >>> saved_words("training"), saved_words("inference")
    ('compute saved', 'inference compute saved')
    """
    return _SAVINGS[saving].saved_words
