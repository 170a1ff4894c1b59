"""The middle of the region of settings that train alike: what a search trains of an outcome, and hands out.

A threshold at the edge of its region is one rounding away from another training, on this seed and the more on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import numpy as np
from optuna.distributions import FloatDistribution, IntDistribution

from analysis.trace_replay.same_run import RESOLUTION, varied_variables
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from tune_cac.tuning.outcomes.distinct_outcomes import Outcome
from tune_cac.tuning.trial_config import asked_of
from tune_cac.tuning.warm_start.baseline import WarmStart
from tune_cac.tuning.warm_start.threshold_ranges import outcome, predictions

#: Values that are tried between the last one known to train alike and the first one known not to.
_BETWEEN = 15
#: Digits of a threshold.
_DIGITS = 5


def at_middle(one: Outcome, known: WarmStart, trace: RunTrace) -> Outcome:
    """Return an outcome with the variables of its setting's rule in the middle of the values that train alike.

    Each variable in turn is moved to the middle of its own values within the space's range, the others as they are by
    then; whole numbers stay on the space's grid. One that trains alike over all of its range is left as it was drawn:
    it decides nothing on this run, and its middle would say as little.

    Args:
        one: as the trace predicts it.
        known: the space on the run of its length.
        trace: recorded runs of that length.
    """
    drawn, _ = asked_of(known.space, one.parameters, known.context)
    parameter_of = {full.rpartition(".")[2]: full for full in one.parameters}  # those of a branch begin with its name
    for name in varied_variables(TrialConfig.from_mapping(one.config)):
        parameter = parameter_of.get(name, "")
        own, asked = one.parameters.get(parameter), drawn.distributions.get(parameter)
        if own is None or not isinstance(asked, (FloatDistribution, IntDistribution)):
            continue  # one of a few choices
        if not isclose(own, one.config.get(name, np.nan), abs_tol=10.0**-_DIGITS):  # Optuna's steps are not rounded
            continue  # another rule's

        def alike(values: Sequence[Any], one: Outcome = one, name: str = name) -> list[bool]:
            rows = predictions(trace, [{**one.config, name: value} for value in values], branches=True)
            return [row is not None and outcome(row, one.config) == one.identity for row in rows]

        unit = asked.step if isinstance(asked, IntDistribution) else RESOLUTION
        low, high = (_edge(own, end, unit, alike) for end in (asked.low, asked.high))
        middle = _as(own, (low + high) / 2, unit)
        if (low, high) != (asked.low, asked.high) and middle != own and alike([middle])[0]:
            one = replace(one, parameters={**one.parameters, parameter: middle}, config={**one.config, name: middle})
    return one


def _edge(own: float, end: float, unit: float, alike: Callable[[Sequence[Any]], list[bool]]) -> float:
    """Return the last value from a setting's own towards an end that trains alike.

    Steps double until one trains otherwise; then the values between are tried.

    Args:
        own: the setting's value; an int for a variable in iterations.
        end: least or highest value of the space.
        unit: first step; all steps of an int are multiples of it.
        alike: tells of values whether they train as the setting does.
    """
    if own == end:
        return own
    sign, width = (1 if end > own else -1), abs(end - own)
    doubled = [own + sign * step for k in range(64) if (step := unit * 2**k) < width]
    values = [own, *(_as(own, value, unit) for value in doubled), end]
    last = _last_alike(values, alike)
    if last + 1 < len(values):
        between = np.linspace(values[last], values[last + 1], _BETWEEN + 2)[:-1]
        values = list(dict.fromkeys(_as(own, value, unit) for value in between))
        last = _last_alike(values, alike)
    return values[last]


def _last_alike(values: Sequence[float], alike: Callable[[Sequence[Any]], list[bool]]) -> int:
    """Return the place of the last value up to which all train as the first one."""
    same = [True, *(alike(values[1:]) if len(values) > 1 else [])]
    return next((place for place, is_same in enumerate(same) if not is_same), len(same)) - 1


def _as(own: float, value: float, unit: float) -> float:
    """Return a value as the setting's own is written: whole steps from it, or a number of few digits."""
    return int(own + round((value - own) / unit) * unit) if isinstance(own, int) else round(float(value), _DIGITS)
