"""Quality and luck of cut runs that are states of the full run, read off that run's epochs.

Two runs of one seed that train apart share no luck. But where the learning-rate schedules are equal up to the cut run's
end (`stage_tree.other_length`), the cut run is a state of the full run, and every epoch of that around there shows how
good such states are, how far they deviate, and how far their luck is that of the end.

Symbols: v variance of the quality of one epoch within a run, estimated from the differences of neighbouring epochs; s^2
variance of a run's quality over seeds. Quality at two epochs correlates over seeds by 1 - v / s^2, and the quality at
an epoch has the variance s^2 or v, whichever is larger: ``benchmarks/common_luck.py`` measures both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.stage_tree.other_length import common_states
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.warm_start.baseline import WarmStart

#: Differences, as large as those of runs that share nothing, which count beside the observed ones: a few epochs that
#: are equal by chance prove little.
_DIFFERENCES_BEFORE = 0.5
#: Epochs before and after a state that show how far such states deviate; one run may be quiet where others are not.
_REACH = 5


@dataclass(frozen=True, kw_only=True)
class DenseState:
    """The full run after an epoch."""

    value: float
    """Its quality."""
    tie: float
    """Correlation over seeds of its luck with that of the full run's end, in 0..1 (`luck_in_common`)."""
    times: float
    """Deviation of its quality over seeds, in that of the full run's (`deviation_of_state`)."""


def luck_in_common(values: Sequence[float], luck: float) -> float:
    """Return the correlation over seeds of a run's quality at its end with that at an earlier epoch, in 0..1.

    >>> round(luck_in_common([0.97, 0.97, 0.97, 0.97], 0.005), 3), luck_in_common([0.97, 0.95, 0.98], 0.005)
    (0.857, 0.0)

    Args:
        values: quality after the earlier epoch and after each one that follows.
        luck: standard deviation of a run's quality over seeds, > 0.
    """
    found = _variances(values)
    variance = (found.sum() + _DIFFERENCES_BEFORE * luck**2) / (len(found) + _DIFFERENCES_BEFORE)
    return float(np.clip(1 - variance / luck**2, 0.0, 1.0))


def deviation_of_state(values: Sequence[float], epochs: int, luck: float) -> float:
    """Return how many times as far as the full run's a state's quality deviates over seeds, >= 1.

    >>> deviation_of_state([0.97, 0.971, 0.97], 2, 0.005), round(deviation_of_state([0.9, 0.95, 0.9], 2, 0.005), 2)
    (1.0, 7.07)

    Args:
        values: quality of the full run after each epoch, of which those near the state count.
        epochs: after which the run has the state.
        luck: standard deviation of a run's quality over seeds, > 0.
    """
    near = _variances(values[max(0, epochs - 1 - _REACH) : epochs + _REACH])
    return float(max(1.0, np.sqrt(near.mean()) / luck)) if len(near) else 1.0


def _variances(values: Sequence[float]) -> NDArray[np.float64]:
    """Return an estimate of v from each two neighbouring epochs."""
    found: NDArray[np.float64] = np.diff(np.asarray(values, np.float64)) ** 2 / 2
    return found


def dense_states(
    runs: Mapping[int, WarmStart], tree: Path | str, full_epochs: int, luck: float
) -> dict[int, DenseState]:
    """Return the full run's states, by epochs, at cut dense runs that are states of it and for some epochs after these.

    Args:
        runs: what the recorded dense runs show, by their epochs.
        tree: the study's ``tree`` folder, or its URI.
        full_epochs: of the full run.
        luck: standard deviation of a run's quality over seeds, > 0.
    """
    full = runs[full_epochs].trace
    if full is None:
        return {}
    rows, every, key = full.dense.recorded.rows, full.steps_per_epoch, full.quality.key
    known = [rows.get(step, {}).get(key) for step in range(every, full.total_steps + 1, every)]
    if not all(value is not None and np.isfinite(value) for value in known):
        return {}
    found: dict[int, DenseState] = {}
    for epochs, run in runs.items():
        if epochs == full_epochs or run.trace is None:
            continue
        if common_states(StageStore(tree, run.trace.root), full_epochs) < run.trace.total_steps:
            continue
        for epoch in range(epochs, min(epochs + _REACH + 1, full_epochs)):
            times = deviation_of_state(known, epoch, luck)
            tie = min(luck_in_common(known[epoch - 1 :], luck), 1 / times)  # what deviates more has no more in common
            found[epoch] = DenseState(value=known[epoch - 1], tie=tie, times=times)
    return found
