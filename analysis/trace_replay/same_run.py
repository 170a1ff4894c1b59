"""Find the values of a setting's variables that train as the setting did, bit for bit.

A setting whose replay on the recorded runs goes through the same stages, to the recorded end, is the same training. So
every variable is varied alone, on a grid, and the values around the setting's own that replay proves equal are its
range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.errors import UserError

#: Thresholds that are tried lie this far apart, and most values that are tried of a variable in iterations.
RESOLUTION, MOST_TRIED = 0.0005, 1000
#: Variables of the variance rule: those in iterations or counts, and thresholds.
WHOLE = ("CAC_VAR_START_ITR", "CAC_VAR_MT_COUNT_THR", "CAC_VAR_SAMPLES")
THRESHOLDS = ("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR")


def same_run(trace: RunTrace, config: TrialConfig, *, stage: str | None = None) -> dict[str, tuple[float, float]]:
    """Return lowest and highest value of each variable of the variance rule with which the training is the same.

    Args:
        trace: the recorded runs of the setting's length, its own among them.
        config: the setting.
        stage: the last stage of its run, where the trace may be that of another run; None if it is its own.

    Returns:
        By variable, each varied alone; without variables of which only the setting's own value is proved. Empty for
        other rules, for manual stops, and where the setting's own run was not recorded.
    """
    if config.method != "gradskip" or config.gradskip_settings().mode != "auto":
        return {}
    own = config.to_dict()
    tried: list[dict[str, Any]] = [own]
    rows: dict[str, list[int]] = {}
    for name in (*THRESHOLDS, *WHOLE):
        if name not in own:  # an interval may follow the braking distance
            continue
        values = _values(name, own[name], trace.total_steps)
        rows[name] = list(range(len(tried), len(tried) + len(values)))
        tried += [{**own, name: value} for value in values]
    try:
        found = replay(trace, pd.DataFrame(tried))
    except UserError:  # the study has not recorded this plan of layers
        return {}
    first = found.iloc[0]
    if not first["exact"] or stage not in (None, first["stage"]):
        return {}
    same = (found["exact"] & (found["stage"] == first["stage"])).to_numpy(bool)
    ranges = {}
    for name, places in rows.items():
        values = [tried[place][name] for place in places]
        low = high = values.index(own[name])
        while low > 0 and same[places[low - 1]]:
            low -= 1
        while high + 1 < len(values) and same[places[high + 1]]:
            high += 1
        if low < high:
            ranges[name] = (values[low], values[high])
    return ranges


def _values(name: str, own: Any, total_steps: int) -> list[Any]:
    """Return ascending values to try, the setting's own among them."""
    if name in THRESHOLDS:
        grid = np.round(np.arange(RESOLUTION, 1 + RESOLUTION / 2, RESOLUTION), 6)
        return sorted({*map(float, grid), float(own)})
    first = 1 if name == "CAC_VAR_SAMPLES" else 0
    steps = np.unique(np.linspace(first, total_steps, min(total_steps, MOST_TRIED)).astype(int))
    return sorted({*map(int, steps), int(own)})


def same_run_text(ranges: dict[str, tuple[float, float]]) -> str:
    """Return the ranges in words, each of a variable alone.

    >>> same_run_text({"CAC_VAR_START_THR": (0.93, 0.96), "CAC_VAR_SAMPLES": (3, 5)})
    'CAC_VAR_START_THR 0.93 to 0.96, CAC_VAR_SAMPLES 3 to 5'
    """
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())
