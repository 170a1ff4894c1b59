"""Luck that a cut dense run has in common with the full run whose start it is.

Two runs of one seed that train apart share no luck. But where the learning-rate schedules are equal up to the cut run's
end (`stage_tree.other_length`), the cut run is a state of the full run, and their qualities differ between seeds by
what the full run still moves after it. How much that is shows in the full run's own epochs from there on.

Symbols: v variance of the quality of one epoch within a run, estimated from the n differences of neighbouring epochs;
s^2 variance of a run's quality over seeds. Quality at two epochs then correlates by 1 - v / s^2, as measured in
``benchmarks/common_luck.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trainables.stage_tree.other_length import common_states
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.warm_start.baseline import WarmStart

#: Differences, as large as those of runs that share nothing, which count beside the observed ones: a few epochs that
#: are equal by chance prove little.
_DIFFERENCES_BEFORE = 0.5


def luck_in_common(values: Sequence[float], luck: float) -> float:
    """Return the correlation over seeds of a run's quality at its end with that at an earlier epoch, in 0..1.

    >>> luck_in_common([0.97, 0.97, 0.97, 0.97], 0.005), luck_in_common([0.97, 0.95, 0.98], 0.005)
    (0.8571428571428572, 0.0)

    Args:
        values: quality after the earlier epoch and after each one that follows.
        luck: standard deviation of a run's quality over seeds, > 0.
    """
    squares = np.diff(np.asarray(values, np.float64)) ** 2 / 2
    if not np.isfinite(squares).all():
        return 0.0
    variance = (squares.sum() + _DIFFERENCES_BEFORE * luck**2) / (len(squares) + _DIFFERENCES_BEFORE)
    return float(np.clip(1 - variance / luck**2, 0.0, 1.0))


def tied_lengths(runs: Mapping[int, WarmStart], tree: Path | str, full_epochs: int, luck: float) -> dict[int, float]:
    """Return, by epochs, `luck_in_common` of cut dense runs that are states of the full run; others are left out.

    Args:
        runs: what the recorded dense runs show, by their epochs.
        tree: the study's ``tree`` folder, or its URI.
        full_epochs: of the full run.
        luck: standard deviation of a run's quality over seeds, > 0.
    """
    found: dict[int, float] = {}
    full = runs[full_epochs].trace
    if full is None:
        return found
    rows, every = full.dense.recorded.rows, full.steps_per_epoch
    for epochs, known in runs.items():
        if epochs == full_epochs or known.trace is None:
            continue
        store = StageStore(tree, known.trace.root)
        values = [
            rows.get(step, {}).get(full.quality.key) for step in range(epochs * every, full.total_steps + 1, every)
        ]
        if None not in values and common_states(store, full_epochs) >= known.trace.total_steps:
            found[epochs] = luck_in_common(values, luck)
    return found
