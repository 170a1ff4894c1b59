"""Kind of compute that a study ranks by, and the words for it.

Skipped gradients save training compute, pruned weights save inference compute; a study ranks by one of the two or by
their mean. Symbols: T training compute saved (`compute_saved`), I inference compute saved (`inference_saved`), both
fractions <= 1.

| saving | ranked by |
|---|---|
| ``training``, or missing | T |
| ``inference`` | I |
| ``both`` | (T + I) / 2 |
"""

from __future__ import annotations

from typing import Any

import pandas as pd

#: Column that `relative_to_baseline` adds: the compute saved that the study ranks by.
SAVED = "saved"
TRAINING, INFERENCE, BOTH = "training", "inference", "both"
_SHARE = {
    TRAINING: "the training compute",
    INFERENCE: "the inference compute",
    BOTH: "training and inference compute, on average",
}
_SAVED = {
    TRAINING: "compute saved",
    INFERENCE: "inference compute saved",
    BOTH: "mean of training and inference saved",
}


def saved_of(trials: pd.DataFrame) -> pd.Series[float]:
    """Return what each trial saves of the compute that its study ranks by.

    Args:
        trials: one row per trial, with a column ``compute_saved``, which is returned where there is no column
            ``saving`` or ``inference_saved``, as in a table of a few columns, and for rows without a ``saving``.

    Returns:
        Fractions, float64; NaN where not known.

    >>> trials = pd.DataFrame({
    ...     "saving": [None, "training", "inference", "both"], "compute_saved": 0.2, "inference_saved": 0.6,
    ... })
    >>> saved_of(trials).tolist()
    [0.2, 0.2, 0.6, 0.4]
    """
    training = _numbers(trials, "compute_saved")
    if "saving" not in trials.columns or "inference_saved" not in trials.columns or trials["saving"].isna().all():
        return training.rename(SAVED)
    inference = _numbers(trials, "inference_saved")
    saved = training.mask(_is(trials, INFERENCE), inference).mask(_is(trials, BOTH), (training + inference) / 2)
    return saved.rename(SAVED)


def saved_of_one(row: pd.Series) -> float:
    """Return what one trial saves of the compute that its study ranks by; NaN where not known."""
    training, inference = (_number(row, name) for name in ("compute_saved", "inference_saved"))
    saving = saving_of(row)
    if saving == TRAINING or "inference_saved" not in row.index:
        return training
    return inference if saving == INFERENCE else (training + inference) / 2


def _number(row: pd.Series, name: str) -> float:
    value = row.get(name)
    return float("nan") if value is None or pd.isna(value) else float(value)


def ranks_by_training(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows of studies that rank by training compute."""
    if "saving" not in trials.columns:
        return pd.Series(True, index=trials.index)
    return ~(_is(trials, INFERENCE) | _is(trials, BOTH))


def _numbers(trials: pd.DataFrame, name: str) -> pd.Series[float]:
    return trials[name].astype("Float64").astype("float64")


def _is(trials: pd.DataFrame, saving: str) -> pd.Series[bool]:
    return trials["saving"].isin([saving])


def objectives_of(saving: str) -> tuple[str, str]:
    """Return the columns that a study with this saving maximises.

    >>> objectives_of("training"), objectives_of("both")
    (('accuracy', 'compute_saved'), ('accuracy', 'saved'))
    """
    return ("accuracy", "compute_saved" if saving == TRAINING else SAVED)


def saving_of(trials: pd.DataFrame | pd.Series | None) -> str:
    """Return what a study ranks by, from its first trial with a ``saving``: ``training``, ``inference`` or ``both``.

    Args:
        trials: rows of one study, or one row. Where there is no ``saving``, and for None: training.

    >>> saving_of(pd.DataFrame({"saving": [None, "both"]})), saving_of(pd.Series({"trial": 1}))
    ('both', 'training')
    """
    found: Any = None
    if isinstance(trials, pd.Series):
        found = trials.get("saving")
    elif trials is not None and "saving" in trials.columns:
        found = next(iter(trials["saving"].dropna()), None)
    return TRAINING if found is None or pd.isna(found) else str(found)


def savings_of(trials: pd.DataFrame) -> list[str]:
    """Return the different values of ``saving`` of these trials, without missing ones."""
    return [str(found) for found in trials["saving"].dropna().unique()] if "saving" in trials.columns else []


def share_words(saving: str) -> str:
    """Return the words for the ranked compute in a sentence such as "you can skip 31 % of ...".

    >>> share_words("inference")
    'the inference compute'
    """
    return _SHARE[saving]


def saved_words(saving: str) -> str:
    """Return the words for the ranked saving in a heading, an axis label or a line of numbers.

    >>> saved_words("training"), saved_words("inference")
    ('compute saved', 'inference compute saved')
    """
    return _SAVED[saving]
