"""The middle of the region of settings that train alike: what a search trains of an outcome, and hands out.

A threshold at the edge of its region is one rounding away from another training, on this seed and the more on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.trace_replay.same_run import RESOLUTION, THRESHOLDS, WHOLE, least_value
from analysis.trace_replay.traces import RunTrace
from tune_cac.tuning.outcomes.distinct_outcomes import Outcome
from tune_cac.tuning.warm_start.threshold_ranges import outcome, predictions

#: Values that are tried between the last one known to train alike and the first one known not to.
_BETWEEN = 15
#: Digits of a threshold.
_DIGITS = 5


def at_middle(one: Outcome, trace: RunTrace) -> Outcome:
    """Return an outcome with the variables of the variance rule in the middle of the values that train alike.

    Each variable in turn is moved to the middle of its own values, the others as they are by then.

    Args:
        one: as the trace predicts it.
        trace: recorded runs of its length.
    """
    for name in (*THRESHOLDS, *WHOLE):
        own = one.parameters.get(name)
        if own is None or own != one.config.get(name):  # of a branch of the space, or another rule's
            continue

        def alike(values: Sequence[Any], one: Outcome = one, name: str = name) -> list[bool]:
            rows = predictions(trace, [{**one.config, name: value} for value in values], branches=True)
            return [row is not None and outcome(row, one.config) == one.identity for row in rows]

        unit, ends = (1, (least_value(name), trace.total_steps)) if name in WHOLE else (RESOLUTION, (RESOLUTION, 1.0))
        low, high = (_edge(own, end, unit, alike) for end in ends)
        middle = _as(own, (low + high) / 2)
        if middle != own and alike([middle])[0]:
            one = replace(one, parameters={**one.parameters, name: middle}, config={**one.config, name: middle})
    return one


def _edge(own: float, end: float, unit: float, alike: Callable[[Sequence[Any]], list[bool]]) -> float:
    """Return the last value from a setting's own towards an end that trains alike.

    Steps double until one trains otherwise; then the values between are tried.

    Args:
        own: the setting's value; an int for a variable in iterations.
        end: least or highest value.
        unit: first step.
        alike: tells of values whether they train as the setting does.
    """
    if own == end:
        return own
    sign, width = (1 if end > own else -1), abs(end - own)
    doubled = [own + sign * step for k in range(64) if (step := unit * 2**k) < width]
    values = [own, *(_as(own, value) for value in (*doubled, end))]
    last = _last_alike(values, alike)
    if last + 1 < len(values):
        between = np.linspace(values[last], values[last + 1], _BETWEEN + 2)[:-1]
        values = list(dict.fromkeys(_as(own, value) for value in between))
        last = _last_alike(values, alike)
    return values[last]


def _last_alike(values: Sequence[float], alike: Callable[[Sequence[Any]], list[bool]]) -> int:
    """Return the place of the last value up to which all train as the first one."""
    same = [True, *(alike(values[1:]) if len(values) > 1 else [])]
    return next((place for place, is_same in enumerate(same) if not is_same), len(same)) - 1


def _as(own: float, value: float) -> float:
    """Return a value as the setting's own is written: a whole number, or one of few digits."""
    return round(value) if isinstance(own, int) else round(float(value), _DIGITS)
