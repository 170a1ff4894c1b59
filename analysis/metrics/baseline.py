"""Comparison of every trial with the baseline of its own study, workload, seed and searched options."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.io.checked import group_codes, is_value, keys_of, numbers_of, plain
from analysis.metrics.quality import quality_of
from analysis.metrics.saving import saved_of
from trainables.metrics import RELATIVE
from trainables.quality import Quality
from trainables.savings import SAVED, share_saved

#: Column added, and the column of which it is the saved share.
_SAVED = {
    "time_saved": "train_time_s",
    "communication_saved": "gradient_bytes",
    "optimizer_bytes_saved": "optimizer_bytes",
    "peak_memory_saved": "peak_memory_bytes",
}
#: Columns of the baseline with which trials are compared, beside those of the metric.
_REFERENCE = ("epochs", "dense_flops", "backward_flops", *_SAVED.values())


def relative_names(quality: Quality) -> list[str]:
    """Return the columns that `relative_to_baseline` adds to trials of this metric, in order."""
    own = {"accuracy_drop": quality.drop, "test_accuracy_drop": quality.test_drop}
    return [own.get(metric.name, metric.name) for metric in RELATIVE]


def relative_to_baseline(trials: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of `trainables.metrics.RELATIVE`: drops of the metric, shares of time, bytes and memory saved.

    `saved` is the compute that the study ranks by (`analysis.metrics.saving`); it needs no baseline.

    A trial is compared with the completed trial of role ``baseline`` of the same study, workload, seed and searched
    options of the workload (of those columns that exist). With several baselines, the mean of the longest ones counts.
    Without a baseline, as among rows that were selected from a study, accuracy losses and shares keep their values, NaN
    where there are none yet.

    A trial measures `compute_saved` and `backward_saved` against its own full budget. For a trial with another number
    of epochs than its baseline, such as a cut dense run, or with another full budget in FLOPs, such as a
    script that knows only what it executed, they are recomputed against the baseline's budget:
    ``1 - executed_flops / the baseline's dense_flops``, and likewise for the backward FLOPs. Both are computed from
    counts, so a second call changes nothing.

    Args:
        trials: one row per trial, as `analysis.load` gives it.

    Returns:
        A copy with the columns added (or recomputed), and with columns of numbers converted (`analysis.io.checked`).

    Raises:
        UserError: a column of numbers holds text.

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline", "search", "search"], "status": "completed", "seed": [0, 0, 1],
    ...     "accuracy": [0.97, 0.96, 0.99], "train_time_s": [10.0, 8.0, 8.0],
    ... })
    >>> relative_to_baseline(trials)[["accuracy_drop", "time_saved"]].round(3).values.tolist()
    [[0.0, 0.0], [0.01, 0.2], [nan, nan]]
    """
    attrs, trials = trials.attrs, plain(trials)
    add_relative(trials)
    trials.attrs = dict(attrs)
    return trials


def add_relative(trials: pd.DataFrame) -> None:
    """Add the columns of `relative_to_baseline` to a frame; columns are replaced, so a shallow copy is sufficient."""
    quality = quality_of(trials)
    baseline, compared = _baseline_of_each(trials, quality)
    relative = {
        name: quality.sign * (baseline[measured] - numbers_of(trials, measured)) + 0.0  # no negative zero
        for name, measured in ((quality.drop, quality.name), (quality.test_drop, quality.test))
    }
    relative |= {name: _saved(trials, spent, baseline[spent]) for name, spent in _SAVED.items()}
    for name, values in relative.items():
        trials[name] = values if compared.all() else values.where(compared, numbers_of(trials, name))
    epochs = numbers_of(trials, "epochs")
    other_length = epochs.notna() & baseline["epochs"].notna() & (epochs != baseline["epochs"])
    # The mean budget of several baselines may differ from each of them by rounding.
    whole_flops = baseline["dense_flops"]
    other_budget = (numbers_of(trials, "dense_flops") - whole_flops).abs() > 1e-9 * whole_flops.where(whole_flops > 0)
    for name, spent, whole in (
        ("compute_saved", "executed_flops", "dense_flops"),
        ("backward_saved", "backward_flops", "backward_flops"),
    ):
        restated = _saved(trials, spent, baseline[whole])
        here = other_length | (other_budget & restated.notna())
        if here.any():
            trials[name] = numbers_of(trials, name).where(~here, restated)
    if "compute_saved" in trials.columns:
        trials[SAVED] = saved_of(trials)


def has_baseline(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the trials with a completed baseline of the same group (`groups`) in the frame."""
    return _baseline_of_each(trials, quality_of(trials))[1]


def _baseline_of_each(trials: pd.DataFrame, quality: Quality) -> tuple[pd.DataFrame, pd.Series[bool]]:
    """Return the baseline's values for each trial (float64, NaN where there is none), and whether it has a baseline."""
    group = groups(trials)
    done = (is_value(trials, "role", "baseline") & is_value(trials, "status", "completed")).to_numpy()
    numbers = pd.DataFrame(
        {name: numbers_of(trials, name).to_numpy() for name in (quality.name, quality.test, *_REFERENCE)}
    )
    candidates, own = numbers[done], group[done]
    most = candidates["epochs"].groupby(own).transform("max")
    longest = ((candidates["epochs"] == most) | most.isna()).to_numpy()
    reference = candidates[longest].groupby(own[longest]).mean()
    found = reference.reindex(group).set_axis(trials.index)
    return found, pd.Series(np.isin(group, own), index=trials.index)


def baseline_numbers(trials: pd.DataFrame) -> pd.Series[int] | None:
    """Return the number of the baseline that each trial is compared with; None unless studies search options."""
    if "options" not in trials.columns or trials["options"].nunique() < 2:
        return None
    done = (is_value(trials, "role", "baseline") & is_value(trials, "status", "completed")).to_numpy()
    group, numbers = groups(trials), trials["trial"].to_numpy()
    first = {int(code): int(number) for code, number in zip(group[done][::-1], numbers[done][::-1], strict=True)}
    return pd.Series([first.get(int(code)) for code in group], index=trials.index, dtype="Int64")


def baseline_of(trials: pd.DataFrame, row: pd.Series) -> pd.Series:
    """Return the row of a baseline in a study, of the options of a trial if the study searches options."""
    rows = trials[trials["role"] == "baseline"]
    own = row.get("options")
    if own is not None and not pd.isna(own):
        rows = rows[rows["options"] == own]
    return rows.iloc[0]


def groups(trials: pd.DataFrame) -> NDArray[np.int64]:
    """Return (N,) group numbers; trials of equal study, workload, seed and searched options share a baseline."""
    return group_codes(trials, keys_of(trials))


def _saved(trials: pd.DataFrame, name: str, whole: pd.Series[float]) -> pd.Series[float]:
    return share_saved(numbers_of(trials, name), whole.where(whole > 0))
