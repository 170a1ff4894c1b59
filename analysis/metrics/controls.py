"""Controls: cut dense runs of the same compute, and stops at random places.

A setting that saves 30 % of the compute with an accuracy loss of 0.3 points is useless if training for 70 % of the
epochs, with the schedule shortened accordingly, reaches the same accuracy. Settings are compared with a line through
the baseline, which saves nothing, and the cut dense runs. At a saving s its value is the larger of:

- the linear interpolation between the neighbours of s (a length in between would give about this accuracy);
- the best accuracy of all cut dense runs that save at least s, as a larger saving is acceptable, too.

The line ends at the shortest of them; settings that save more are not compared. Both sides are single trainings:
within one sample of the validation split, and within the noise of another seed (`noise`), they are about equal. Compute
is always that of training: in a study that ranks by inference compute, or by both, no trial is compared.
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
from analysis.metrics.quality import quality_of
from analysis.metrics.saving import ranks_by_training
from trainables.errors import UserError
from trainables.quality import ACCURACY, Quality

#: Role of a cut dense run that is a result of its own: the search chose its length, and searches stops on it.
CUT = "cut"
#: Values of the column ``control``.
SHORTER, RANDOM_STOPS = "shorter", "random stops"
#: The same as readers see them.
CONTROL_NAMES = {SHORTER: "cut dense run", RANDOM_STOPS: "random stops"}
_LINE = ("trial", "epochs", "compute_saved")
#: Results of the comparison of a setting with a cut dense run.
BEATS, EQUAL, LOSES = "yes", "about equal", "no"


def is_control(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows that are controls."""
    return trials["role"] == "control"


def is_cut(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows that train fewer epochs than their study's full run."""
    return trials["of_epochs"].notna() if "of_epochs" in trials.columns else pd.Series(False, index=trials.index)


def is_shorter(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the cut dense runs, whose savings and values are the line of `control_line`."""
    return is_value(trials, "control", SHORTER)


def control_line(trials: pd.DataFrame) -> pd.DataFrame:
    """Return savings and accuracies of the baseline and of the controls of kind ``shorter``, ascending.

    Args:
        trials: one row per trial of one study, as `analysis.load` gives it.

    Returns:
        Columns ``trial``, ``epochs``, ``compute_saved`` (against the baseline's budget), ``accuracy`` or the study's
        metric. Empty where the study has no completed baseline or no completed cut dense run.
        ``line.attrs["quality"]`` is the metric, ``line.attrs["resolution"]`` one sample of the validation split as a
        fraction, None where it is not known and for other metrics than an accuracy.

    Raises:
        UserError: a column is missing or holds text instead of numbers; the controls are of several studies or seeds.

    >>> trials = pd.DataFrame({
    ...     "trial": [0, 1, 2, 3], "role": ["baseline", "search", "control", "control"], "status": "completed",
    ...     "control": [None, None, "shorter", "shorter"], "epochs": [10, 10, 8, 6],
    ...     "accuracy": [0.97, 0.965, 0.968, 0.95], "compute_saved": [0.0, 0.3, 0.2, 0.4],
    ... })
    >>> control_line(trials).values.tolist()
    [[0.0, 10.0, 0.0, 0.97], [2.0, 8.0, 0.2, 0.968], [3.0, 6.0, 0.4, 0.95]]
    """
    quality = quality_of(trials)
    trials = plain(trials, needed=("trial", "role", "status", *_LINE[1:], quality.name))
    done = trials[is_value(trials, "status", "completed")]
    # A script that reports only `compute_saved` has none for another number of epochs.
    shorter = done[is_value(done, "control", SHORTER) & done["compute_saved"].notna()]
    if len(np.unique(groups(shorter))) > 1:
        raise UserError("a line of controls is of one study and seed, got several: pick the rows of one")
    same = np.isin(groups(done), groups(done)[is_value(done, "control", SHORTER).to_numpy()])
    baseline = done[is_value(done, "role", "baseline") & same].head(1)
    if shorter.empty or baseline.empty:
        empty = done.loc[[], [*_LINE, quality.name]]
        empty.attrs["quality"] = quality
        return empty
    line = pd.concat([baseline, shorter])[[*_LINE, quality.name]]
    worse_first = line[quality.name] * quality.sign
    line = line.iloc[np.lexsort((worse_first, line["compute_saved"]))].reset_index(drop=True)
    line.attrs |= {"resolution": _resolution(done, quality), "quality": quality}
    return line


def _resolution(trials: pd.DataFrame, quality: Quality) -> float | None:
    """Return one sample as a fraction; None where it is not known, and for what is no count of samples."""
    return resolution_of(trials[quality.name]) if quality.is_accuracy else None


def _quality_of(line: pd.DataFrame) -> Quality:
    found: Quality = line.attrs.get("quality", ACCURACY)
    return found


def accuracy_when_shorter(line: pd.DataFrame, saved: Any) -> NDArray[np.float64]:
    """Return (N,) accuracies, or values of the study's metric, that cut dense runs reach at these savings.

    They are NaN beyond the shortest of these runs.

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
    quality = _quality_of(line)
    at, good = line["compute_saved"].to_numpy(float), quality.sign * line[quality.name].to_numpy(float)
    # Best value among the trainings that save at least as much.
    best_beyond = np.maximum.accumulate(good[::-1])[::-1]
    place = np.searchsorted(at, wanted - ROUNDING)
    inside = place < len(at)
    found = np.full(wanted.shape, np.nan)
    found[inside] = quality.sign * np.maximum(np.interp(wanted[inside], at, good), best_beyond[place[inside]])
    return found


def difference_that_says_nothing(line: pd.DataFrame, accuracy: Any) -> NDArray[np.float64]:
    """Return the difference up to which a setting and a cut dense run are about equal: a sample or the seed noise.

    Of other metrics than an accuracy neither is known: 0.

    Args:
        line: from `control_line`.
        accuracy: fractions, of any shape.
    """
    quality = _quality_of(line)
    if not quality.is_accuracy:
        return np.zeros_like(np.asarray(accuracy, dtype=np.float64))
    resolution = line.attrs.get("resolution") or resolution_of(line[quality.name])
    return np.maximum(seed_noise(accuracy, resolution), resolution or 0.0)


def beats_shorter(trials: pd.DataFrame, line: pd.DataFrame) -> pd.Series[Any]:
    """Return whether each trial is better in the metric than a cut dense run of the same compute, judged by one seed.

    Returns:
        ``yes``, ``no`` or, within `difference_that_says_nothing`, ``about equal``, on the trials' index; NA beyond the
        end of the line, for trials that save nothing or did not complete, for the points of the line itself, and where
        the study ranks by other compute than that of training.

    >>> line = pd.DataFrame({"compute_saved": [0.0, 0.2, 0.4], "accuracy": [0.97, 0.968, 0.95]})
    >>> trials = pd.DataFrame({
    ...     "status": "completed", "accuracy": [0.97, 0.9, 0.99, 0.96, 0.97],
    ...     "compute_saved": [0.0, 0.1, 0.3, 0.3, 0.6],
    ... })
    >>> beats_shorter(trials, line).tolist()
    [<NA>, 'no', 'yes', 'about equal', <NA>]
    """
    quality = _quality_of(line)
    trials = plain(trials, needed=("status", quality.name, "compute_saved"))
    reached = accuracy_when_shorter(line, trials["compute_saved"].astype(float))
    judged = (
        is_value(trials, "status", "completed").to_numpy()
        & (trials["compute_saved"].astype(float) > ROUNDING).to_numpy()
        & ~np.isnan(reached)
        & ~is_value(trials, "control", SHORTER).to_numpy()
        & ranks_by_training(trials).to_numpy()
    )
    value = trials[quality.name].astype(float).to_numpy()
    more = quality.sign * (value - reached)
    nothing = difference_that_says_nothing(line, (value + reached) / 2) + ROUNDING
    words = pd.Series(np.select([more > nothing, more < -nothing], [BEATS, LOSES], EQUAL), index=trials.index)
    return words.astype("string").mask(~judged)
