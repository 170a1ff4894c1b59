"""The warm start of a search from its baseline's recorded run: ranges, predicted stops and savings, no effect.

All results depend on the run alone, bit for bit, whatever was trained since, so that a resumed search learns the same.
"""

from __future__ import annotations

import bisect
import json
import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.trace_replay.replay_frame import missing_costs, missing_facts, replay
from analysis.trace_replay.traces import OF_SCRIPT, RunTrace, complete, facts_key, read_trace
from search_spaces import Space, SpaceContext, load
from search_spaces.space import Answers, Range, corners, describe
from trainables.attachment import metadata_key
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.replay import Blueprint, Unit, signal_name
from trainables.gradskip.rules.choice import NAMED
from trainables.gradskip.rules.published_batch import Curve
from trainables.gradskip.variables import BY_NAME
from trainables.stage_tree.root import ensure_costs, method_facts
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.plan import SearchPlan

# --- Ranges in which thresholds make a difference ---------------------------------------------------------------------
# A threshold below every ratio v / peak that a layer's variance v ever reaches, the peak its largest so far, is never
# met, and a search that samples there trains its baseline again and again. The ratio of an iteration is lowest if the
# rule has seen every iteration before it (CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1). So the lowest of these is the lower
# end of a threshold's useful range: exact for the first target, which stops in the baseline's own run; approximate for
# later ones, whose variances change once an earlier layer has stopped. The upper end is 1: a layer stops at the first
# fall of its variance. Ratios reached only in the last quarter of the run do not count: a stop there saves almost
# nothing. T is the number of steps.

#: How far a range extends below the lowest ratio reached, as a share of that ratio's distance from 1; more for later
#: layers, whose variances may fall further in other runs than in the baseline.
BEYOND_EXACT, BEYOND_ESTIMATE = 0.0, 0.25
#: Share of the run that counts, from its start; a later stop has too little left to save.
USEFUL_SHARE = 0.75
#: No range begins below this; a threshold must be positive.
LOWEST_THRESHOLD = 0.01


def with_learned_ranges(context: SpaceContext, trace: RunTrace, configs: Iterable[TrialConfig]) -> SpaceContext:
    """Return the context with the ranges in which the variance rule's thresholds make a difference on this run.

    There is one configuration for each way in which the space selects layers (``CAC_WATCH``, ``CAC_WHOLE_UNITS``).
    Those of other rules, without a layer plan in the study, or of runs that begin otherwise (`RunTrace.begins`) are
    skipped. What is not known, or would be empty as no layer's variance ever falls, is unchanged.
    """
    firsts: list[float] = []
    laters: list[float] = []
    starts: list[int] = []
    for config in configs:
        by_variance = config.skips_gradients and config.gradskip_settings().mode == "auto"
        if not by_variance or facts_key(config) not in trace.facts or not trace.begins(config):
            continue
        blueprint = trace.blueprint(config)
        curves = []  # (T,) variances in the run's useful part; empty if unknown
        for unit in _stoppable(blueprint):
            values, there = trace.dense.signal(signal_name(config.gradskip_settings(), unit.watched))
            curves.append(values[: math.ceil(USEFUL_SHARE * trace.total_steps) if there.any() else 0])
        # The rule passes over a layer that does not move.
        moving = [values for values in curves if len(values) == 0 or (values != values[0]).any()]
        for place, values in enumerate(moving):
            lowest = float(np.min(_ratios(values, blueprint), initial=np.inf))
            (laters if place else firsts).append(lowest)
        if moving:
            starts.append(_latest_start(moving[0], blueprint))
    found: dict[str, Any] = {}
    if (lowest := min(firsts, default=math.inf)) < 1:
        found["first_thresholds"] = _range(lowest, BEYOND_EXACT)
    if (lowest := min(laters, default=math.inf)) < 1:
        found["later_thresholds"] = _range(lowest, BEYOND_ESTIMATE)
    if (latest := max(starts, default=-1)) >= 0:
        found["latest_start_itr"] = latest
    return replace(context, **found)


def _stoppable(blueprint: Blueprint) -> Sequence[Unit]:
    return blueprint.plan.units[: blueprint.stoppable]


def _ratios(values: NDArray[np.float64], blueprint: Blueprint) -> NDArray[np.float64]:
    """Return (T,) ratios, infinite at peaks."""
    return Curve.of(np.arange(len(values)), values, single_precision=blueprint.single_precision).ratios


def _latest_start(values: NDArray[np.float64], blueprint: Blueprint) -> int:
    """Return the last start iteration after which some ratio falls below 1; -1 if there is none.

    By a search in halves: an earlier start has seen an equal or higher peak, so what falls after a later one does, too.
    """

    def stays(start: int) -> bool:
        return not (_ratios(values[start:], blueprint) < 1).any()

    return bisect.bisect_left(range(len(values)), True, key=stays) - 1


def _range(lowest: float, beyond: float) -> tuple[float, float]:
    """Return the range from the lowest ratio that counts to 1, on a grid of 1e-6 for readable numbers."""
    # A ratio must be below a threshold, in single precision.
    return max(LOWEST_THRESHOLD, (math.floor((lowest - beyond * (1 - lowest)) * 1e6) + 2) / 1e6), 1.0


# --- What settings stop and save --------------------------------------------------------------------------------------


def predictions(
    trace: RunTrace, settings: Sequence[Mapping[str, Any]], *, branches: bool = False
) -> list[dict[str, Any] | None]:
    """Return a row of `replay` for each setting; None for settings without one.

    With ``branches`` runs with a method are read, too.
    """
    trace = trace if branches else trace.dense_only()
    # Settings of one layer plan are replayed together: if the study lacks it, only they have no prediction.
    plans: dict[str, list[int]] = {}
    for row, values in enumerate(settings):
        plans.setdefault(facts_key(TrialConfig.from_mapping(values)), []).append(row)
    found: dict[Any, dict[Any, Any]] = {}
    for rows in plans.values():
        try:
            frame = replay(trace, pd.DataFrame([settings[row] for row in rows], index=rows))
        except UserError:
            continue
        found.update(frame[frame["compute_saved"].notna()].to_dict("index"))
    return [found.get(row) for row in range(len(settings))]


def never_acts(config: TrialConfig, trace: RunTrace) -> bool:
    """Return whether the baseline's run proves that a configuration does nothing; False if that is unknown."""
    (found,) = predictions(trace, [config.to_dict()])
    return found is not None and bool(found["exact"])  # any action would have left the only stage


def outcome_identity(found: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return a text that is equal for settings that train alike: of the stops in a trial's or a replay's row."""
    stops = [(event["iteration"], event["layer"]) for event in json.loads(found.get("stop_events") or "[]")]
    how: list[Any] = [(values.get("CAC_BRAKING_DISTANCE") or 0) if stops else 0]
    norms, mode = values.get("CAC_NORM_STATISTICS"), values.get("CAC_PREFIX_MODE")
    if norms == "hold_all" or (stops and norms == "hold"):
        how.append(norms)
    if (factor := float(values.get("CAC_LR_FACTOR") or 1)) != 1:
        how.append(factor)
    if stops and mode == "eval":
        how.append(mode)
    rule = NAMED.get(str(values.get("CAC_RULE")))
    if rule is not None and rule.scales_every_step:
        how += [str(value) for name, value in sorted(values.items()) if name.startswith("CAC_RULE")]
    return json.dumps([stops, how])


class DrawnTrial(Answers):
    """Stand-in for an Optuna trial that draws each parameter at random and records it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.params: dict[str, Any] = {}

    def answer(self, asked: Range) -> Any:
        """Draw a choice, or a number: uniform on its grid, in its range, or in its logarithm."""
        rng, low, high, step = self._rng, asked.low, asked.high, asked.step
        if asked.choices is not None:
            value = rng.choice(asked.choices)
        elif asked.integer and asked.log:
            # Each integer has the share of the interval within 0.5 of it, as in Optuna.
            value = round(math.exp(rng.uniform(math.log(low - 0.5), math.log(high + 0.5))))
        elif asked.integer:
            value = rng.randrange(low, high + 1, step)
        elif step is not None:
            value = low + step * rng.randint(0, math.floor((high - low) / step + 1e-9))
        else:
            value = math.exp(rng.uniform(math.log(low), math.log(high))) if asked.log else rng.uniform(low, high)
        self.params[asked.name] = value if asked.choices is not None else min(high, max(low, value))
        return self.params[asked.name]


# --- Warm start from the baseline's run -------------------------------------------------------------------------------

#: The spaces that are searched where thresholds stop nothing: of scripts that gave no model, and of all others.
EXPLICIT_STOPS, FROZEN_PREFIX = "manual_layers", "frozen_prefix"
#: Spaces that stop layers on a run whose variances do not fall.
_WORKS = f"--space stop_rules has rules that need no falling variance, --space {EXPLICIT_STOPS} none at all"
#: Draws that tell whether a space does nothing.
_DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A search space with what the baseline's run shows about it."""

    space: Space
    context: SpaceContext  # the run, with ranges in which thresholds make a difference on it, if these are known
    base: TrialConfig
    hold: Mapping[str, Any]
    trace: Any  # the recorded runs; None if there are none
    weight_decays: Sequence[float] | None = None  # weight decays of the run's weights; None if unknown
    has_model: bool = True  # False for a script whose optimizer was given none, so that no prefix can be held

    @property
    def knows_what_acts(self) -> bool:
        """Return whether replay predicts settings of the space, so that the baseline's run can prove one never acts."""
        return self.trace is not None and self.space.method in ("gradskip", "none")

    def drawn(self, seed: int, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return parameters and whole configurations of random settings of the space."""
        rng, fixed = random.Random(seed), {**self.base.to_dict(), "method": self.space.method}
        drawn = []
        for _ in range(count):
            recorder = DrawnTrial(rng)
            values = self.space.suggest(recorder, self.context)
            drawn.append((recorder.params, {**fixed, **under_one_set_of_options(values), **self.hold}))
        return drawn

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return the choices of categorical parameters, which must be the same in all trials of a study."""
        return {one.name: one.choices for one in describe(self.space, self.context) if one.choices is not None}

    def _modes(self) -> set[str]:
        configs = typical_configs(self.space, self.context, self.base, self.hold)
        return {config.gradskip_settings().mode for config in configs if config.skips_gradients}

    def _without_decay(self) -> str:
        """Return that the variance rule has little effect without weight decay, and what works; else empty."""
        if self.weight_decays is None or any(self.weight_decays) or self._modes() != {"auto"}:
            return ""
        return f"weight decay is 0, so hardly anything drives weight variance below its peak on this run: {_WORKS}"

    def _why_inert(self, seed: int) -> str:
        """Return that no setting of the space does anything on this run, why, and what does; empty if some may."""
        predicted = predictions(self.trace, [values for _, values in self.drawn(seed, _DRAWS)])
        if not all(found is not None and found["exact"] and found["stops"] == 0 for found in predicted):
            return ""
        nothing = f"space {self.space.name} does nothing on this run"
        if self.context.first_thresholds is None:
            return (
                f"{nothing}: the rule stops layers from the first on, and the weight variance of the first that moves "
                f"never falls below its peak, as without weight decay; {_WORKS}"
            )
        return (
            f"{nothing}: no layer stops with the values that it fixes, for the first one's weight variance falls to "
            f"{self.context.first_thresholds[0]:.4g} of its peak; fix a higher threshold (--set "
            "CAC_VAR_START_THR=...), or search --space auto_thresholds, whose ranges are those of the run"
        )

    def why_little(self, seed: int) -> str:
        """Return why no or hardly any setting of the space does anything on this run; empty if that is unknown."""
        return (self._why_inert(seed) if self.knows_what_acts else "") or self._without_decay()

    def with_explicit_stops(self, seed: int) -> tuple[WarmStart, str] | None:
        """Return this with a space of explicit stops, and why: thresholds stop (hardly) anything on this run.

        The reason is a replay without stops, or a run without weight decay. None if neither holds, or for other rules.
        """
        if self.space.method != "gradskip" or self._modes() != {"auto"} or self.space.options:
            return None
        if {"CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR"} & {*self.hold} or not any(
            "CAC_VAR_START_THR" in name for parameters, _ in self.drawn(seed, 1) for name in parameters
        ):
            return None  # the space's question is another one
        # Where ranges are known other thresholds stop something.
        inert = self._why_inert(seed) if self.trace is not None and self.context.first_thresholds is None else ""
        reason = inert or self._without_decay()
        if not reason:
            return None
        why = f"space {self.space.name} does nothing on this run" if inert else reason.partition(":")[0]
        if self.has_model:
            return replace(self, space=load(FROZEN_PREFIX)), (
                f"{why}: a frozen prefix is searched instead (--space {FROZEN_PREFIX}), how deep, from when, with what "
                "held"
            )
        context = self.context
        if self.trace is not None:  # its costs are those of the recorded layers
            blueprint = self.trace.blueprint(typical_configs(self.space, context, self.base, self.hold)[0])
            ends = tuple(blueprint.plan.order[unit.end] for unit in _stoppable(blueprint))
            context = replace(context, unit_ends=ends)
        return replace(self, space=load(EXPLICIT_STOPS), context=context), (
            f"{why}: explicit stops of whole units are searched instead (--space {EXPLICIT_STOPS})"
        )


def learn(plan: SearchPlan, root: str | None) -> WarmStart:
    """Learn from a recorded dense run of the plan's base.

    Nothing is known without its root in the stage tree, and nothing is needed by a space that decides itself.
    """
    space, context, base, hold = plan.space, plan.context, plan.base, plan.hold
    nothing = WarmStart(space=space, context=context, base=base, hold=hold, trace=None)
    if root is None or (space.next_point is not None and plan.learns and plan.grid is None):
        return nothing
    try:
        # Only Gradient-Skip's part can be replayed.
        typical = typical_configs(space, context, base, hold)
        configs = [replace(config, method="gradskip") for config in typical if config.skips_gradients]
        store = StageStore(plan.tree, root)
        write_facts(store, configs)
        trace = complete(read_trace(store), plan.tree)
    except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
        # The folder may also have been emptied, or the disk be full.
        warn_of_nothing_learned(error)
        return nothing
    context = with_learned_ranges(context, trace, configs)
    return replace(nothing, context=context, trace=trace, weight_decays=trace.run.get("weight_decays"))


def warn_of_nothing_learned(error: Exception) -> None:
    """Warn that the baseline's run is not known, and why."""
    what = error if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
    warnings.warn(f"nothing was learned from the baseline: {what}", stacklevel=3)


def under_one_set_of_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space's values without the options of the workload, for a recorded run has one set of them."""
    return {name: value for name, value in values.items() if name != "workload_options"}


def typical_configs(
    space: Space, context: SpaceContext, base: TrialConfig, hold: Mapping[str, Any]
) -> list[TrialConfig]:
    """Return one configuration of the space for each distinct `metadata_key`."""
    found: dict[Any, TrialConfig] = {}
    for values in corners(space, context):
        config = replace(base, **{"method": space.method, **under_one_set_of_options(values), **hold})
        found.setdefault(metadata_key(config), config)
    return list(found.values())


def completed(store: StageStore, trace: RunTrace, settings: Any) -> RunTrace:
    """Return the trace with the layer plans and costs that these settings need; missing ones go into the study."""
    if trace.run.get(OF_SCRIPT):
        return trace
    if plans := missing_facts(trace, settings):
        given = [{name: getattr(plan, name) for name in BY_NAME} for plan in plans]
        write_facts(store, [trace.config_of(values) for values in given])
        trace = read_trace(store)
    if masks := missing_costs(trace, settings):
        ensure_costs(store, trace.config_of({"method": "none"}), masks)
        trace = read_trace(store)
    return trace


def write_facts(store: StageStore, configs: list[TrialConfig]) -> None:
    """Write the layer plans and step costs that replay needs beside the recorded signals."""
    described = store.read("root.json")
    if described is None or described.get(OF_SCRIPT):  # which leaves them itself
        return
    trains = described["trains"]
    for given in configs:
        config = replace(given, device="cpu")
        plan = method_facts(store, config)["plan"]
        stopped = [set(plan["order"][: unit["end"] + 1]) for unit in plan["units"]]
        masks = ["".join("0" if n in those else digit for n, digit in enumerate(trains)) for those in stopped]
        ensure_costs(store, config, [trains, *masks])
