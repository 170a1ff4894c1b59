"""Every trial against the baseline of its own seed."""

from __future__ import annotations

import pandas as pd

from analysis.saving import SAVED, saved_of

#: Which trials are compared with each other: never those of different studies, workloads or seeds.
_KEYS = ("study", "workload", "seed")
#: Column added: column that it is the saved share of.
_SAVED = {
    "time_saved": "train_time_s",
    "communication_saved": "gradient_bytes",
    "optimizer_bytes_saved": "optimizer_bytes",
    "peak_memory_saved": "peak_memory_bytes",
}
#: Column added: accuracy that it is the drop of.
_DROPS = {"accuracy_drop": "accuracy", "test_accuracy_drop": "test_accuracy"}
#: Columns of the baseline that others are compared with.
_REFERENCE = ("epochs", "dense_flops", "backward_flops", *_DROPS.values(), *_SAVED.values())


def relative_to_baseline(trials: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of `trainables.metrics.RELATIVE`: drops in accuracy, shares of time, bytes and memory saved.

    `saved` is what the study ranks by (`analysis.saving`); it needs no baseline.

    A trial is compared with the completed trial of role ``baseline`` of the same study (where there is a column
    ``study``), workload and seed; where there is none, the other columns are NaN. With several, the mean of the
    longest counts.

    A trial measures `compute_saved` and `backward_saved` against its own full budget. For one with another number of
    epochs than its baseline, such as dense training cut short, or with other FLOPs of a full budget, such as a script
    that only knows what it executed, they are restated here against the baseline's:
    ``1 - executed_flops / the baseline's dense_flops``, and the same of the backward FLOPs. Both come from what was
    counted, so doing this twice changes nothing.

    Args:
        trials: one row a trial, as `analysis.load` gives it.

    Returns:
        A copy with the columns added (or renewed).

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline", "search", "search"], "status": "completed", "seed": [0, 0, 1],
    ...     "accuracy": [0.97, 0.96, 0.99], "train_time_s": [10.0, 8.0, 8.0],
    ... })
    >>> relative_to_baseline(trials)[["accuracy_drop", "time_saved"]].round(3).values.tolist()
    [[0.0, 0.0], [0.01, 0.2], [nan, nan]]
    """
    trials = trials.copy()
    add_relative(trials)
    return trials


def add_relative(trials: pd.DataFrame) -> None:
    """The same in a frame of one's own; no value is changed in place, so that a shallow copy of another's will do."""
    baseline = _baseline_of_each(trials)
    for name, accuracy in _DROPS.items():
        trials[name] = baseline[accuracy] - _numbers(trials, accuracy)
    for name, spent in _SAVED.items():
        trials[name] = _saved(trials, spent, baseline[spent])
    epochs = _numbers(trials, "epochs")
    other_length = epochs.notna() & baseline["epochs"].notna() & (epochs != baseline["epochs"])
    # Several baselines have the mean of their budgets, which may differ from each by a rounding.
    whole_flops = baseline["dense_flops"]
    other_budget = (_numbers(trials, "dense_flops") - whole_flops).abs() > 1e-9 * whole_flops.where(whole_flops > 0)
    for name, spent, whole in (
        ("compute_saved", "executed_flops", "dense_flops"),
        ("backward_saved", "backward_flops", "backward_flops"),
    ):
        restated = _saved(trials, spent, baseline[whole])
        here = other_length | (other_budget & restated.notna())
        if here.any():
            trials[name] = _numbers(trials, name).where(~here, restated)
    if "compute_saved" in trials.columns:
        trials[SAVED] = saved_of(trials)


def _baseline_of_each(trials: pd.DataFrame) -> pd.DataFrame:
    """For each trial what its baseline had, float64, NaN where there is none."""
    keys = [name for name in _KEYS if name in trials.columns]
    done = (trials["role"] == "baseline") & (trials["status"] == "completed")
    numbers = pd.DataFrame({name: _numbers(trials, name) for name in _REFERENCE}, index=trials.index)
    candidates = pd.concat([trials[keys], numbers], axis="columns")[done.fillna(False).to_numpy(dtype=bool)]
    most = candidates.groupby(keys)["epochs"].transform("max")
    candidates = candidates[(candidates["epochs"] == most) | most.isna()]
    reference = candidates.groupby(keys)[list(_REFERENCE)].mean()
    found = trials[keys].merge(reference, how="left", left_on=keys, right_index=True)
    return found[list(_REFERENCE)].set_axis(trials.index)


def _saved(trials: pd.DataFrame, name: str, whole: pd.Series[float]) -> pd.Series[float]:
    return 1 - _numbers(trials, name) / whole.where(whole > 0)


def _numbers(trials: pd.DataFrame, name: str) -> pd.Series[float]:
    """A column as float64, NaN where there is none."""
    if name not in trials.columns:
        return pd.Series(float("nan"), index=trials.index, dtype="float64")
    return trials[name].astype("Float64").astype("float64")
