"""Controls: what simply training shorter would have given for the same compute, and stops at random places.

A setting that saves 30 % of the compute at a drop of 0.3 points has found nothing if 70 % of the epochs, with the
schedule shortened with them, end as well. The line that a setting has to beat goes through the baseline, which saves
nothing, and the shorter trainings. At a saving s it is the better of two:

- the value of the straight line between the neighbours of s (a length in between would end about there);
- the best of all shorter trainings that save at least s, for who may save s may save more.

Beyond the shortest training there is no line, and nothing is said. Both sides are one training: within one sample of
the validation split, and within what another seed changes (`noise`), they are about equal. Compute is the
training's throughout: in a study that ranks by inference compute, or by both, training shorter is no rival and no
trial is judged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import ROUNDING
from analysis.io.checked import is_value, plain
from analysis.metrics.baseline import groups
from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.saving import ranks_by_training
from trainables.errors import UserError

#: Values of the column ``control``.
SHORTER, RANDOM_STOPS = "shorter", "random stops"
#: Whether a setting beats training shorter.
BEATS, EQUAL, LOSES = "yes", "about equal", "no"


def is_control(trials: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are controls."""
    return trials["role"] == "control"


def control_line(trials: pd.DataFrame) -> pd.DataFrame:
    """Savings and accuracies of training shorter: the baseline and the controls of kind ``shorter``, ascending.

    Args:
        trials: one row a trial of one study, as `analysis.load` gives it.

    Returns:
        Columns ``trial``, ``epochs``, ``compute_saved`` (against the baseline's budget), ``accuracy``. Empty where the
        study has no completed baseline or no completed shorter training. ``line.attrs["resolution"]`` is one sample of
        the validation split as a fraction, None where it is not known.

    Raises:
        UserError: a column is missing or holds text instead of numbers; these are controls of several studies or seeds.

    >>> trials = pd.DataFrame({
    ...     "trial": [0, 1, 2, 3], "role": ["baseline", "search", "control", "control"], "status": "completed",
    ...     "control": [None, None, "shorter", "shorter"], "epochs": [10, 10, 8, 6],
    ...     "accuracy": [0.97, 0.965, 0.968, 0.95], "compute_saved": [0.0, 0.3, 0.2, 0.4],
    ... })
    >>> control_line(trials).values.tolist()
    [[0.0, 10.0, 0.0, 0.97], [2.0, 8.0, 0.2, 0.968], [3.0, 6.0, 0.4, 0.95]]
    """
    needed = ("trial", "role", "status", "epochs", "compute_saved", "accuracy")
    trials = plain(trials, needed=needed)
    done = trials[is_value(trials, "status", "completed")]
    # A script that reports `compute_saved` alone has none for another length than its own.
    shorter = done[is_value(done, "control", SHORTER) & done["compute_saved"].notna()]
    if len(np.unique(groups(shorter))) > 1:
        raise UserError("a line of controls is of one study and seed, got several: pick the rows of one")
    same = np.isin(groups(done), groups(done)[is_value(done, "control", SHORTER).to_numpy()])
    baseline = done[is_value(done, "role", "baseline") & same].head(1)
    if shorter.empty or baseline.empty:
        return done.loc[[], ["trial", "epochs", "compute_saved", "accuracy"]]
    line = pd.concat([baseline, shorter])[["trial", "epochs", "compute_saved", "accuracy"]]
    line = line.sort_values(["compute_saved", "accuracy"], kind="stable").reset_index(drop=True)
    line.attrs["resolution"] = resolution_of(done["accuracy"])
    return line


def accuracy_when_shorter(line: pd.DataFrame, saved: Any) -> NDArray[np.float64]:
    """(N,) accuracy that training shorter reaches at these savings; NaN beyond the shortest training.

    Args:
        line: from `control_line`.
        saved: (N,) fractions of the baseline's compute.

    >>> line = pd.DataFrame({"compute_saved": [0.0, 0.2, 0.4], "accuracy": [0.97, 0.968, 0.95]})
    >>> accuracy_when_shorter(line, [0.1, 0.3, 0.5]).round(4).tolist()
    [0.969, 0.959, nan]
    """
    wanted = np.asarray(saved, dtype=np.float64)
    if len(line) == 0:
        return np.full(wanted.shape, np.nan)
    at, accuracy = line["compute_saved"].to_numpy(float), line["accuracy"].to_numpy(float)
    # From here on, the best accuracy among those that save at least as much.
    best_beyond = np.maximum.accumulate(accuracy[::-1])[::-1]
    place = np.searchsorted(at, wanted - ROUNDING)
    inside = place < len(at)
    found = np.full(wanted.shape, np.nan)
    found[inside] = np.maximum(np.interp(wanted[inside], at, accuracy), best_beyond[place[inside]])
    return found


def difference_that_says_nothing(line: pd.DataFrame, accuracy: Any) -> NDArray[np.float64]:
    """Return the difference up to which a setting and shorter training are about equal: a sample, or a seed's noise.

    Args:
        line: from `control_line`.
        accuracy: fractions, of any shape.
    """
    resolution = line.attrs.get("resolution") or resolution_of(line["accuracy"])
    return np.maximum(seed_noise(accuracy, resolution), resolution or 0.0)


def beats_shorter(trials: pd.DataFrame, line: pd.DataFrame) -> pd.Series[Any]:
    """Whether each trial is more accurate than training shorter for the same compute, by one seed.

    Returns:
        ``yes``, ``no`` or, within `difference_that_says_nothing`, ``about equal``, on the trials' index; NA where the
        line does not reach, for trials that save nothing or did not complete, for the points of the line itself, and
        where the study ranks by other compute than the training's.

    >>> line = pd.DataFrame({"compute_saved": [0.0, 0.2, 0.4], "accuracy": [0.97, 0.968, 0.95]})
    >>> trials = pd.DataFrame({
    ...     "status": "completed", "accuracy": [0.97, 0.9, 0.99, 0.96, 0.97],
    ...     "compute_saved": [0.0, 0.1, 0.3, 0.3, 0.6],
    ... })
    >>> beats_shorter(trials, line).tolist()
    [<NA>, 'no', 'yes', 'about equal', <NA>]
    """
    trials = plain(trials, needed=("status", "accuracy", "compute_saved"))
    reached = accuracy_when_shorter(line, trials["compute_saved"].astype(float))
    judged = (
        is_value(trials, "status", "completed").to_numpy()
        & (trials["compute_saved"].astype(float) > ROUNDING).to_numpy()
        & ~np.isnan(reached)
        & (_kind(trials) != SHORTER).to_numpy()
        & ranks_by_training(trials).to_numpy()
    )
    accuracy = trials["accuracy"].astype(float).to_numpy()
    more = accuracy - reached
    nothing = difference_that_says_nothing(line, (accuracy + reached) / 2) + ROUNDING
    words = pd.Series(np.select([more > nothing, more < -nothing], [BEATS, LOSES], EQUAL), index=trials.index)
    return words.astype("string").mask(~judged)


def _kind(trials: pd.DataFrame) -> pd.Series[str]:
    if "control" not in trials.columns:  # a study of an earlier version
        return pd.Series("", index=trials.index, dtype="string")
    return trials["control"].astype("object").where(trials["control"].notna(), "")
