"""Ranges in which thresholds make a difference, learned from the baseline's run, which is recorded step by step.

A threshold below every ratio that a layer's variance ever reaches is never met, and a search that samples there trains
its baseline again and again. The ratio of an iteration is lowest if the rule has seen every iteration before it
(CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1): a later start or rarer decisions can only miss peaks. So the lowest of these
ratios is the lower end of a threshold's useful range: exact for the first target, which stops in the baseline's own
run; approximate for later targets, whose variances change once an earlier layer has stopped. The upper end is 1: a
layer stops at the first fall of its variance. Ratios that are reached only in the last quarter of the run do not count:
a stop there saves almost nothing, and costs a search as much to try as any other.

All results depend on the baseline's run alone, bit for bit, whatever was trained since, so that a resumed search learns
the same.

Symbols: v variance, peak the largest v so far, ratio v / peak. Shapes: T steps.
"""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace, facts_key
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.replay import Blueprint, Unit, signal_name
from trainables.gradskip.rules.published_batch import Curve

#: How far a range extends below the lowest ratio reached, as a share of that ratio's distance from 1: 0 if the ratio is
#: exact; more for later layers, whose variances may fall further in other runs than in the baseline.
BEYOND_EXACT, BEYOND_ESTIMATE = 0.0, 0.25
#: Share of the run that counts, from its start; a later stop has too little left to save.
USEFUL_SHARE = 0.75
#: No range begins below this; a threshold must be positive.
LOWEST_THRESHOLD = 0.01
#: Number of settings drawn to choose a search's first settings from.
DRAWS = 2000


def with_learned_ranges(context: SpaceContext, trace: RunTrace, configs: Iterable[TrialConfig]) -> SpaceContext:
    """Return the context with the ranges in which the variance rule's thresholds make a difference on this run.

    Args:
        context: of the run.
        trace: its recorded training.
        configs: one configuration for each way in which the space selects layers (``CAC_WATCH``, ``CAC_WHOLE_UNITS``).
            Configurations of other rules, or without a layer plan in the study, are skipped.

    Returns:
        The context; unknown fields, and ranges that would be empty because no layer's variance ever falls, are
        unchanged.
    """
    firsts: list[float] = []
    laters: list[float] = []
    starts: list[int] = []
    for config in configs:
        if (
            not config.skips_gradients
            or config.gradskip_settings().mode != "auto"
            or facts_key(config) not in trace.facts
        ):
            continue
        blueprint = trace.blueprint(config)
        units = blueprint.plan.units[: blueprint.stoppable]
        for place, unit in enumerate(unit for unit in units if _moves(_variances(trace, config, unit))):
            ratios = ratios_of(trace, blueprint, config, unit)
            (laters if place else firsts).append(float(np.min(ratios, initial=np.inf)))
            if place == 0:
                starts.append(_latest_start(trace, blueprint, config, unit))
    found: dict[str, Any] = {}
    if (lowest := min(firsts, default=math.inf)) < 1:
        found["start_thr_range"] = _range(lowest, BEYOND_EXACT)
    if (lowest := min(laters, default=math.inf)) < 1:
        found["later_thr_range"] = _range(lowest, BEYOND_ESTIMATE)
    if (latest := max(starts, default=-1)) >= 0:
        found["latest_start_itr"] = latest
    return replace(context, **found)


def ratios_of(trace: RunTrace, blueprint: Blueprint, config: TrialConfig, unit: Unit) -> NDArray[np.float64]:
    """Return (T,) ratios of a layer's variance in the run's useful part, infinite at peaks; empty if unknown."""
    values = _variances(trace, config, unit)
    return Curve.of(np.arange(len(values)), values, single_precision=blueprint.single_precision).ratios


def _variances(trace: RunTrace, config: TrialConfig, unit: Unit) -> NDArray[np.float64]:
    values, there = trace.dense.signal(signal_name(config.gradskip_settings(), unit.watched))
    return values[: math.ceil(USEFUL_SHARE * trace.total_steps)] if there.any() else values[:0]


def _moves(variances: NDArray[np.float64]) -> bool:
    """Return whether a layer may move; the rule passes over one that does not."""
    return len(variances) == 0 or bool((variances != variances[0]).any())


def _latest_start(trace: RunTrace, blueprint: Blueprint, config: TrialConfig, unit: Unit) -> int:
    """Return the last start iteration after which some ratio falls below 1; -1 if there is none.

    An earlier start has seen an equal or higher peak by then, so a ratio below 1 after a start is also below 1 after
    every earlier start.
    """
    values = _variances(trace, config, unit)

    def falls_after(start: int) -> bool:
        seen = Curve.of(np.arange(len(values) - start), values[start:], single_precision=blueprint.single_precision)
        return bool((seen.ratios < 1).any())

    return bisect.bisect_left(range(len(values)), True, key=lambda start: not falls_after(start)) - 1


def _range(lowest: float, beyond: float) -> tuple[float, float]:
    """Return the range from the lowest ratio that counts to 1, on a grid of 1e-6 for readable numbers."""
    # A ratio must be below a threshold, in single precision.
    return max(LOWEST_THRESHOLD, (math.floor((lowest - beyond * (1 - lowest)) * 1e6) + 2) / 1e6), 1.0


def never_acts(config: TrialConfig, trace: RunTrace) -> bool:
    """Return whether the baseline's run proves that a configuration does nothing, so that its result is known.

    False if that is unknown: a signal or a layer plan was not recorded, or the baseline did not end well.
    """
    try:
        found = replay(trace.dense_only(), config)
    except UserError:
        return False
    return bool(found["exact"].iloc[0])  # any action would have left the only stage


# --- first settings of a search -------------------------------------------------------------------------------------


#: Spaces that stop layers on a run whose variances do not fall.
_WORKS = "--space stop_rules has rules that need no falling variance, --space manual_layers none at all"


def without_decay(configs: Iterable[TrialConfig], weight_decays: Sequence[float] | None) -> str:
    """Return a message that the variance rule has little effect without weight decay, and what works; else empty.

    Args:
        configs: one for each way in which the space selects layers.
        weight_decays: of the run's weights, as its optimizer has them; None if unknown.
    """
    modes = {config.gradskip_settings().mode for config in configs if config.skips_gradients}
    if weight_decays is None or any(weight_decays) or modes != {"auto"}:
        return ""
    return f"weight decay is 0, so hardly anything drives weight variance below its peak on this run: {_WORKS}"


def why_inert(space: Space, context: SpaceContext, predicted: Iterable[Mapping[str, Any] | None]) -> str:
    """Return a message that no setting of a space does anything on this run, why, and what does; empty if some may.

    Args:
        space: what is searched.
        context: of the run, with the ranges of `with_learned_ranges`.
        predicted: `predictions` of random settings.
    """
    if not all(found is not None and found["exact"] and found["stops"] == 0 for found in predicted):
        return ""
    nothing = f"space {space.name} does nothing on this run"
    if context.start_thr_range is None:
        return (
            f"{nothing}: the rule stops layers from the first on, and the weight variance of the first that moves "
            f"never falls below its peak, as without weight decay; {_WORKS}"
        )
    return (
        f"{nothing}: no layer stops with the values that it fixes, for the first one's weight variance falls to "
        f"{context.start_thr_range[0]:.4g} of its peak; fix a higher threshold (--set CAC_VAR_START_THR=...), or "
        "search --space auto_thresholds, whose ranges are those of the run"
    )


def predictions(
    trace: RunTrace, settings: Sequence[Mapping[str, Any]], *, branches: bool = False
) -> list[dict[str, Any] | None]:
    """Return a row of `replay` for each setting; None for settings without one.

    Args:
        trace: the recorded runs.
        settings: fields of a configuration each.
        branches: whether runs with a method are read, too, not only the one without.
    """
    trace = trace if branches else trace.dense_only()
    # Settings of one layer plan are replayed together: if the study lacks it, only they have no prediction.
    plans: dict[str, list[int]] = {}
    for row, values in enumerate(settings):
        plans.setdefault(facts_key(TrialConfig.from_mapping(values)), []).append(row)
    found: dict[int, dict[str, Any]] = {}
    for rows in plans.values():
        try:
            frame = replay(trace, pd.DataFrame([settings[row] for row in rows], index=rows))
        except UserError:
            continue
        frame = frame[frame["compute_saved"].notna()]
        for row, record in zip(frame.index.tolist(), frame.to_dict("records"), strict=True):
            found[row] = {str(column): value for column, value in record.items()}
    return [found.get(row) for row in range(len(settings))]


def outcome(found: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return a text that is equal for settings that train alike."""
    stops = [(event["iteration"], event["layer"]) for event in json.loads(found["stop_events"])]
    how: list[Any] = [(values.get("CAC_BRAKING_DISTANCE") or 0) if stops else 0]
    if values.get("CAC_RULE") == "freezeout":
        how += [str(value) for name, value in sorted(values.items()) if name.startswith("CAC_RULE")]
    return json.dumps([stops, how])


def spread(saved: Sequence[tuple[float, int]], count: int) -> list[int]:
    """Choose ``count`` of (savings, number), sorted by savings, nearest to evenly spaced savings; return the numbers.

    >>> spread([(0.1, 5), (0.11, 6), (0.12, 7), (0.5, 8), (0.9, 9)], 3)
    [5, 8, 9]
    """
    if len(saved) <= count:
        return [number for _, number in saved]
    left = list(saved)
    low, high = saved[0][0], saved[-1][0]
    chosen = []
    for place in range(count):
        target = low + (high - low) * place / max(1, count - 1)
        nearest = min(left, key=lambda pair: (abs(pair[0] - target), pair))
        left.remove(nearest)
        chosen.append(nearest)
    return [number for _, number in sorted(chosen)]


class DrawnTrial:
    """Stand-in for an Optuna trial that draws each parameter at random and records it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.params: dict[str, Any] = {}
        self.choices: dict[str, tuple[Any, ...]] = {}

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Draw an integer in [low, high], uniform on its grid or in its logarithm."""
        if log:
            # Each integer has the share of the interval within 0.5 of it, as in Optuna.
            drawn = round(math.exp(self._rng.uniform(math.log(low - 0.5), math.log(high + 0.5))))
            self.params[name] = min(high, max(low, drawn))
        else:
            self.params[name] = self._rng.randrange(low, high + 1, step)
        return int(self.params[name])

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Draw a number in [low, high], uniform or uniform in its logarithm."""
        if step is not None:
            value = low + step * self._rng.randint(0, math.floor((high - low) / step + 1e-9))
        elif log:
            value = math.exp(self._rng.uniform(math.log(low), math.log(high)))
        else:
            value = self._rng.uniform(low, high)
        self.params[name] = min(high, max(low, value))
        return float(self.params[name])

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Draw one of the choices."""
        self.choices[name] = tuple(choices)
        self.params[name] = self._rng.choice(self.choices[name])
        return self.params[name]
