"""Formulas of what a run saves, and the kinds of compute that a study can rank by. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: Column of the saving that a study ranks by (`ranked_saving`).
SAVED = "saved"
TRAINING, INFERENCE, BOTH, TIME = "training", "inference", "both", "time"
#: The same, with multiplications by zeros left out of inference: what kernels for sparse weights would save.
SPARSE, BOTH_SPARSE = "sparse-inference", "both-sparse"


class _Saving(NamedTuple):
    columns: tuple[str, ...]  # of a result row, whose mean ranks: fractions, negative where more was executed
    compute: str  # in a sentence such as "you can skip 31 % of ..."
    words: str  # in a heading, an axis label or a line of numbers


_SAVINGS = {
    TRAINING: _Saving(("compute_saved",), "the training compute", "compute saved"),
    INFERENCE: _Saving(("inference_saved",), "the inference compute", "inference compute saved"),
    SPARSE: _Saving(
        ("sparse_inference_saved",),
        "the multiply-adds of inference where kernels skip zeros (those of a CPU do not)",
        "inference saved where zeros are skipped",
    ),
    BOTH: _Saving(
        ("compute_saved", "inference_saved"),
        "training and inference compute, on average",
        "mean of training and inference saved",
    ),
    BOTH_SPARSE: _Saving(
        ("compute_saved", "sparse_inference_saved"),
        "training compute and, where kernels skip zeros (those of a CPU do not), inference, on average",
        "mean of training saved and of inference where zeros are skipped",
    ),
    TIME: _Saving(("time_saved",), "the training time", "training time saved"),
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


def ranked_saving(saving: str | None, column: Callable[[str], Any]) -> Any:
    """Return what a study with this saving (None: training) ranks by, from its row's columns: numbers or Series.

    >>> row = {"compute_saved": 0.2, "inference_saved": 0.5, "sparse_inference_saved": 0.6}
    >>> [round(ranked_saving(saving, row.__getitem__), 6) for saving in (None, "inference", "both", "both-sparse")]
    [0.2, 0.5, 0.35, 0.4]
    """
    names = _SAVINGS[saving or TRAINING].columns
    return sum(column(name) for name in names) / len(names)


def of_zeros(saving: str) -> str:
    """Return the kind of saving in whose inference multiplications by zeros do not count."""
    return {INFERENCE: SPARSE, BOTH: BOTH_SPARSE}.get(saving, saving)


def share_words(saving: str) -> str:
    """Return the words for the ranked compute in a sentence: ``the inference compute``."""
    return _SAVINGS[saving].compute


def saved_words(saving: str) -> str:
    """Return the words for the ranked saving in a heading, an axis label or a line of numbers: ``compute saved``."""
    return _SAVINGS[saving].words
