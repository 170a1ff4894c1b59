"""Warm start from the baseline's run: ranges, first settings, and settings that do nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.trace_replay.replay_frame import missing_costs, missing_facts
from analysis.trace_replay.traces import OF_SCRIPT, RunTrace, complete, read_trace
from search_spaces import Space, SpaceContext, load
from search_spaces.space import corners
from trainables.attachment import metadata_key
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.variables import BY_NAME
from trainables.stage_tree.root import ensure_costs, method_facts
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.warm_start.sensitivities import baseline_sensitivities
from tune_cac.tuning.warm_start.threshold_ranges import (
    DRAWS,
    DrawnTrial,
    never_acts,
    outcome,
    predictions,
    spread,
    why_inert,
    with_learned_ranges,
    without_decay,
)

#: The space that is searched where thresholds stop nothing.
EXPLICIT_STOPS = "manual_layers"
#: Draws that find the choices of a space's branches.
_CHOICE_DRAWS = 50


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A search space with what the baseline's run shows about it."""

    space: Space
    context: SpaceContext
    """The run, with ranges in which thresholds make a difference on it, if these are known."""
    base: TrialConfig
    hold: Mapping[str, Any]
    trace: Any
    """The recorded runs; None if there are none."""
    weight_decays: Sequence[float] | None = None
    """Weight decays of the run's weights; None if unknown."""

    def spread(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return parameters of settings with different predicted outcomes, spread evenly over the compute they save.

        Random settings of the space are replayed on the baseline's run. Settings that do nothing are left out; settings
        that would stop the same layers at the same steps count as one.

        Args:
            count: settings wanted.
            seed: of the draws.

        Returns:
            At most ``count``, by ascending savings; none for a space whose outcomes cannot be predicted. If only a part
            of the space can be predicted (some rules of ``stop_rules``), the same part of ``count``, so that the rest
            of the space is not tried less.
        """
        if not self.knows_what_acts or count < 1:
            return []
        drawn = self.drawn(seed)
        predicted = predictions(self.trace, [values for _, values in drawn])
        outcomes: dict[str, tuple[float, int]] = {}
        for row, found in enumerate(predicted):
            if found is not None and found["stops"] > 0 and not found["exact"]:
                outcomes.setdefault(outcome(found, drawn[row][1]), (found["compute_saved"], row))
        known = sum(found is not None for found in predicted)
        wanted = round(count * known / len(drawn))
        return [drawn[row][0] for row in spread(sorted(outcomes.values()), wanted)]

    def drawn(self, seed: int, count: int = DRAWS) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return parameters and whole configurations of random settings of the space."""
        rng, fixed = random.Random(seed), {**self.base.to_dict(), "method": self.space.method}
        drawn = []
        for _ in range(count):
            recorder = DrawnTrial(rng)
            values = self.space.suggest(recorder, self.context)
            drawn.append((recorder.params, {**fixed, **under_one_set_of_options(values), **self.hold}))
        return drawn

    def choices(self, seed: int) -> dict[str, tuple[Any, ...]]:
        """Return the choices of categorical parameters, which must be the same in all trials of a study, as drawn."""
        recorder = DrawnTrial(random.Random(seed))
        for _ in range(_CHOICE_DRAWS):
            self.space.suggest(recorder, self.context)
        return recorder.choices

    def why_little(self, seed: int, *, acts: bool) -> str:
        """Return why no or hardly any setting of the space does anything on this run; empty if that is unknown.

        Args:
            seed: of the settings that are replayed.
            acts: whether a setting is known that does something.
        """
        inert = ""
        if self.knows_what_acts and not acts:
            predicted = predictions(self.trace, [values for _, values in self.drawn(seed)])
            inert = why_inert(self.space, self.context, predicted)
        configs = typical_configs(self.space, self.context, self.base, self.hold)
        return inert or without_decay(configs, self.weight_decays)

    def with_explicit_stops(self, seed: int) -> tuple[WarmStart, str] | None:
        """Return this with explicit stops as the space, and why: thresholds stop (hardly) anything on this run.

        Replay shows it, or no weight decays. None where neither is so, and where the space has other rules.

        Args:
            seed: of the settings that are replayed.
        """
        configs = typical_configs(self.space, self.context, self.base, self.hold)
        by_threshold = {config.gradskip_settings().mode for config in configs if config.skips_gradients} == {"auto"}
        if self.space.method != "gradskip" or not by_threshold or self.space.options:
            return None
        if not any("CAC_VAR_START_THR" in name for parameters, _ in self.drawn(seed, 1) for name in parameters):
            return None  # the space's question is another one
        inert = ""
        if self.trace is not None and self.context.start_thr_range is None:  # else other thresholds stop something
            inert = why_inert(self.space, self.context, predictions(self.trace, [v for _, v in self.drawn(seed)]))
        reason = inert or without_decay(configs, self.weight_decays)
        if not reason:
            return None
        context = self.context
        if self.trace is not None and self.trace.run.get(OF_SCRIPT):  # its costs are those of the recorded layers
            blueprint = self.trace.blueprint(configs[0])
            units = blueprint.plan.units[: blueprint.stoppable]
            context = replace(context, unit_ends=tuple(blueprint.plan.order[unit.end] for unit in units))
        why = reason.partition(":")[0] if inert == "" else f"space {self.space.name} does nothing on this run"
        return replace(self, space=load(EXPLICIT_STOPS), context=context), (
            f"{why}: explicit stops of whole units are searched instead (--space {EXPLICIT_STOPS})"
        )

    @property
    def knows_what_acts(self) -> bool:
        """Return whether replay predicts settings of the space, so that the baseline's run can prove one never acts."""
        return self.trace is not None and self.space.method in ("gradskip", "none")

    def does_nothing(self, config: TrialConfig) -> bool:
        """Return whether the baseline's run proves that this configuration never acts; not under other options."""
        return config.options == self.base.options and self.knows_what_acts and never_acts(config, self.trace)


def learn(
    space: Space,
    context: SpaceContext,
    tree: Path | str,
    *,
    base: TrialConfig,
    hold: Mapping[str, Any],
    root: str | None,
    allowed_drop: float | str = 0.005,
) -> WarmStart:
    """Learn from the baseline's recorded run alone, so that a resumed search learns the same.

    Args:
        space: what is searched.
        context: the run as known before any training.
        tree: the study's ``tree`` folder, or its URI.
        base: config of the baseline.
        hold: fields with one value in every trial.
        root: of the baseline's recorded run; None if it has none.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
    """
    nothing = WarmStart(space=space, context=context, base=base, hold=hold, trace=None)
    if root is None:
        return nothing
    try:
        if asks_for_sensitivities(space, context):
            found = baseline_sensitivities(tree, root, base, context.weight_names, allowed_drop)
            context = replace(context, sensitivities=found)
            nothing = replace(nothing, context=context)
        # Only Gradient-Skip's part can be replayed.
        typical = typical_configs(space, context, base, hold)
        configs = [replace(config, method="gradskip") for config in typical if config.skips_gradients]
        store = StageStore(tree, root)
        write_facts(store, configs)
        trace = complete(read_trace(store), tree)
    except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
        # The folder may also have been emptied, or the disk be full; the search continues without a warm start.
        warn_of_nothing_learned(error)
        return nothing
    return WarmStart(
        space=space, context=with_learned_ranges(context, trace, configs), base=base, hold=hold, trace=trace,
        weight_decays=trace.run.get("weight_decays"),
    )  # fmt: skip


def warn_of_nothing_learned(error: Exception) -> None:
    """Warn that the baseline's run is not known, and why."""
    what = error if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
    warnings.warn(f"nothing was learned from the baseline: {what}", stacklevel=3)


def under_one_set_of_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space's values without the options of the workload, for a recorded run has one set of them."""
    return {name: value for name, value in values.items() if name != "workload_options"}


def asks_for_sensitivities(space: Space, context: SpaceContext) -> bool:
    """Return whether a space's ranges depend on the sensitivities of the baseline's layers."""
    return any("pruning_sensitivities" in values for values in corners(space, context))


def completed(store: StageStore, trace: RunTrace, settings: Any) -> RunTrace:
    """Return the trace with the layer plans and costs that these settings need; count and store missing ones.

    Args:
        store: of the trace's root.
        trace: the recorded run.
        settings: as for `analysis.replay`.

    Raises:
        OSError: it cannot be written into the study.
    """
    if trace.run.get(OF_SCRIPT):
        return trace
    plans = missing_facts(trace, settings)
    if plans:
        given = [{name: getattr(plan, name) for name in BY_NAME} for plan in plans]
        write_facts(store, [trace.config_of(values) for values in given])
        trace = read_trace(store)
    masks = missing_costs(trace, settings)
    if masks:
        ensure_costs(store, trace.config_of({"method": "none"}), masks)
        trace = read_trace(store)
    return trace


def typical_configs(
    space: Space, context: SpaceContext, base: TrialConfig, hold: Mapping[str, Any]
) -> list[TrialConfig]:
    """Return one configuration of the space for each distinct `metadata_key`."""
    found: dict[Any, TrialConfig] = {}
    for values in corners(space, context):
        config = replace(base, **{"method": space.method, **under_one_set_of_options(values), **hold})
        found.setdefault(metadata_key(config), config)
    return list(found.values())


def write_facts(store: StageStore, configs: list[TrialConfig]) -> None:
    """Write the layer plans and step costs that replay needs beside the recorded signals."""
    described = store.read("root.json")
    if described is None:
        return
    trains = described["trains"]
    for given in configs:
        config = replace(given, device="cpu")
        plan = method_facts(store, config)["plan"]
        masks = [trains]
        for unit in plan["units"]:
            stopped = set(plan["order"][: unit["end"] + 1])
            masks.append("".join("0" if n in stopped else digit for n, digit in enumerate(trains)))
        ensure_costs(store, config, masks)
