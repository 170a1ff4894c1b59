"""Find the values of a setting's variables that train as the setting did, bit for bit.

A setting whose replay on the recorded runs goes through the same stages, to the recorded end, is the same training. So
each variable of its rule is varied alone, on a grid, and the values around the setting's own that replay proves equal
are its range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.trace_replay.replay_frame import follow, replay
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.errors import UserError

#: Thresholds that are tried lie this far apart, and most values that are tried of a variable in iterations.
RESOLUTION, MOST_TRIED = 0.0005, 1000
#: Of an interval, on whose multiples layers stop, values between two that train alike may not.
_EVERY = ("CAC_VAR_SAMPLES",)
_FRACTION = (RESOLUTION, 1.0, RESOLUTION)
#: The same of other rules, which are replayed one setting at a time.
_COARSE = (0.005, 1.0, 0.005)
#: Variables of each rule that replay follows without new measurements, with the values that are tried: lowest, highest
#: and their distance; of one in iterations or counts the lowest alone.
VARIED: dict[str, dict[str, tuple[float, float, float] | range | int]] = {
    "auto": {
        "CAC_VAR_START_THR": _FRACTION, "CAC_VAR_MT_THR": _FRACTION, "CAC_VAR_SLOPE_THR": _FRACTION,
        "CAC_VAR_START_ITR": 0, "CAC_VAR_MT_COUNT_THR": 0, "CAC_VAR_SAMPLES": 1,
    },
    "linear": {"CAC_RULE_DEPTH": _COARSE, "CAC_RULE_START_ITR": 0},
    "gradient_norm": {"CAC_RULE_PERCENTILE": (0.5, 100.0, 0.5)},
    "plasticity": {"CAC_RULE_TOLERANCE": (0.005, 0.995, 0.005), "CAC_RULE_WINDOW": range(2, 101)},
}  # fmt: skip


def same_run(trace: RunTrace, config: TrialConfig, *, stage: str | None = None) -> dict[str, tuple[float, float]]:
    """Return lowest and highest value of each variable of the setting's rule with which the training is the same.

    Each is varied alone; variables of which only the setting's own value is proved are left out. Empty for explicit
    stops, and where the setting's own run was not recorded. The trace has the recorded runs of the setting's length;
    ``stage`` is the last one of its run, where the trace may be that of another run; None if it is its own.
    """
    varied = varied_variables(config)
    own = config.to_dict()
    tried: list[dict[str, Any]] = [own]
    rows: dict[str, list[int]] = {}
    for name, tries in varied.items():
        if name not in own:  # an interval may follow the braking distance
            continue
        most = trace.total_steps if name != "CAC_RULE_START_ITR" else own["CAC_RULE_END_ITR"] - 1  # a schedule's start
        values = _values(tries, own[name], most, every=name in _EVERY)
        rows[name] = list(range(len(tried), len(tried) + len(values)))
        tried += [{**own, name: value} for value in values]
    if not rows:
        return {}
    try:
        ends = _ends(trace, tried, config)
    except UserError:  # the study has not recorded this plan of layers
        return {}
    if ends[0] is None or stage not in (None, ends[0]):
        return {}
    same = [end == ends[0] for end in ends]
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


def varied_variables(config: TrialConfig) -> dict[str, tuple[float, float, float] | range | int]:
    """Return the variables of a setting that are varied, as `VARIED` has them; none for what has no rule."""
    return VARIED.get(config.gradskip_settings().mode, {}) if config.method == "gradskip" else {}


def _ends(trace: RunTrace, tried: list[dict[str, Any]], config: TrialConfig) -> list[str | None]:
    if config.gradskip_settings().mode == "auto":
        found = replay(trace, pd.DataFrame(tried))
        return [end if exact else None for end, exact in zip(found["stage"], found["exact"], strict=True)]
    ends: list[str | None] = []
    for values in tried:
        _, path, known = follow(trace, TrialConfig.from_mapping(values))
        end = trace.stages[path.stage]
        ends.append(end.id if known and path.own and end.result(trace.total_steps) is not None else None)
    return ends


def _values(tries: tuple[float, float, float] | range | int, own: Any, most: int, *, every: bool) -> list[Any]:
    """Return ascending values of `VARIED` to try, the setting's own among them.

    ``most`` is the highest value of a variable in iterations; ``every``: none may be left out between two of them.
    """
    if isinstance(tries, tuple):
        low, high, distance = tries
        return sorted({*map(float, np.round(np.arange(low, high + distance / 2, distance), 6)), float(own)})
    if isinstance(tries, range):
        return sorted({*tries, int(own)})
    if every:
        low = max(tries, own - MOST_TRIED // 2)
        return sorted({*range(low, min(most, low + MOST_TRIED) + 1), int(own)})
    steps = np.unique(np.linspace(tries, most, min(most - tries + 1, MOST_TRIED)).astype(int))
    return sorted({*map(int, steps), int(own)})


def same_run_text(ranges: dict[str, tuple[float, float]]) -> str:
    """Return the ranges in words, each of a variable alone.

    >>> same_run_text({"CAC_VAR_START_THR": (0.93, 0.96), "CAC_VAR_SAMPLES": (3, 5)})
    'CAC_VAR_START_THR 0.93 to 0.96, CAC_VAR_SAMPLES 3 to 5'
    """
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())
