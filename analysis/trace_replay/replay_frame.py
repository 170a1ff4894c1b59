"""Prediction of what settings stop and save, from recorded training, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.trace_replay.batch import replay_auto
from analysis.trace_replay.settings import Batch, batches
from analysis.trace_replay.step_by_step import replay_one
from analysis.trace_replay.traces import Predicted, RunTrace, dense_costs, facts_key, trains_after
from trainables.config import TrialConfig
from trainables.gradskip.replay import Blueprint
from trainables.savings import share_of_budget

#: Columns of `replay` with their meanings.
COLUMNS = {
    "stops": "stops decided",
    "stopped_through": "position of the last parameter stopped at the end, -1 for none, as in a trial's row",
    "first_stop": "iteration of the first decision, -1 for none",
    "stop_events": "JSON list of the stops: iteration, layer, name, ratio, rule, as in a trial's row",
    "compute_saved": "1 - executed / dense FLOPs, as in a trial's row; NaN where it cannot be predicted",
    "backward_saved": "the same, of the backward FLOPs alone",
    "exact": "whether the whole run was trained before, so that all of this is what training again would give",
    "accuracy": "that run's accuracy, or the study's metric under its own name; NaN unless exact",
    "exact_until": "stops before this iteration are certain, and that there are no others; the run's length for all",
    "stage": "id of the deepest recorded stage that the run goes through; its last one where exact",
}


def replay(trace: RunTrace, settings: Any) -> pd.DataFrame:
    """Predict what settings stop and save on a recorded run.

    A setting's rule is replayed over the recorded signals, stage by stage, as long as a recorded trial made the same
    stops; this part is exact. Beyond it, signals are taken from the deepest stage of its path that is recorded at that
    iteration, and finally from the run without a method. This is an estimate, as there layers still train that are
    stopped in the setting's own run. The first stop is always exact.

    Savings of a forward cache (``forward_cache_mb``) and of parameters that ``CAC_PREFIX_AUTOGRAD=0`` stops in addition
    are not predicted, except where the run is recorded. Rules whose signal is recorded only while they run
    (gradient_norm, plasticity) have NaN savings, and ``exact`` False, if no trial has recorded them with these timings.

    Args:
        trace: trace from `load_trace`.
        settings: a `Settings`, a `TrialConfig` or a mapping of its fields; a sequence of these; a mapping from labels
            to these; or a DataFrame with fields as columns (missing and NaN: published default; other columns are not
            read). Workload and length are those of the trace. A hundred thousand settings of the variance rule take
            seconds as a DataFrame. Rows of a DataFrame that also compress have NaN savings and no other results.

    Returns:
        One row per setting, on the index of the settings, with the columns of `COLUMNS`.

    Raises:
        UserError: an unknown variable, an invalid value, a setting outside a DataFrame that compresses, or a setting
            for which the study has not recorded the plan of layers or costs (`missing_facts`, `missing_costs`).
    """
    index, found = batches(settings)
    predicted = Predicted.nothing(len(index), trace)
    more = np.zeros(len(index), bool)
    for batch in found:
        more[batch.rows] = batch.config.forward_cache_mb > 0 or not batch.config.gradskip_settings().prefix_autograd
        if batch.foreign:
            predicted.certain_until[batch.rows], predicted.own[batch.rows], predicted.unknown[batch.rows] = (
                0,
                False,
                True,
            )
        elif not batch.never_acts:
            auto = batch.auto
            part = replay_one(trace, batch.config) if auto is None else replay_auto(trace, batch.config, auto)
            predicted.put(batch.rows, part)
    frame = pd.DataFrame(_columns(trace, predicted, more), index=index, copy=False)
    frame.attrs["quality"] = trace.quality
    return frame


def _columns(trace: RunTrace, found: Predicted, more: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the columns; ``more`` says which settings save more than the gradients of their stopped layers."""
    dense, dense_backward = dense_costs(trace)
    results = [stage.result(trace.total_steps) for stage in trace.stages]
    exact = found.own & ~found.unknown & np.array([result is not None for result in results])[found.stage]

    def recorded(name: str) -> NDArray[np.float64]:
        values = [np.nan if result is None else result.get(name, np.nan) for result in results]
        return np.array(values, np.float64)[found.stage]

    def saved(name: str, spared: NDArray[Any], budget: int) -> NDArray[np.float64]:
        values = np.asarray(share_of_budget(spared, budget), dtype=np.float64)
        return np.where(found.unknown, np.nan, np.where(more & exact, recorded(name), values))

    return {
        "stops": found.stops,
        "stopped_through": found.stopped_through,
        "first_stop": found.first_stop,
        "stop_events": "[" + found.events + "]",
        "compute_saved": saved("compute_saved", found.spared, dense),
        "backward_saved": saved("backward_saved", found.spared_backward, dense_backward),
        "exact": exact,
        trace.quality.name: np.where(exact, recorded(trace.quality.key), np.nan),
        "exact_until": found.certain_until,
        "stage": np.array([stage.id for stage in trace.stages], object)[found.stage],
    }


# --- missing records --------------------------------------------------------------------------------------------------


def missing_facts(trace: RunTrace, settings: Any) -> list[TrialConfig]:
    """Return one configuration for each plan of layers that `replay` of these settings needs and the trace lacks."""
    configs = [batch.config for batch in batches(settings)[1] if _is_followed(batch)]
    wanted = {facts_key(config): config for config in configs}
    return [config for key, config in wanted.items() if key not in trace.facts]


def missing_costs(trace: RunTrace, settings: Any) -> list[str]:
    """Return sets of parameters (`RunTrace.trains`) whose costs the trace lacks and `replay` of settings may need.

    Raises:
        UserError: the study has not recorded the plan of layers of a setting (`missing_facts`).
    """
    wanted = {trace.trains: None}
    for batch in batches(settings)[1]:
        if _is_followed(batch):
            blueprint = trace.blueprint(batch.config)
            for through in _ends(blueprint, batch.config):
                wanted[trains_after(trace, blueprint, through)] = None
    return [trains for trains in wanted if trains not in trace.costs]


def _is_followed(batch: Batch) -> bool:
    return not (batch.never_acts or batch.foreign)


def _ends(blueprint: Blueprint, config: TrialConfig) -> Iterable[int]:
    """Return the positions at which stops may end."""
    numbers = config.gradskip_settings().stop_layer_num
    if numbers is not None:
        config.gradskip_settings().check_layers(len(blueprint.plan.order))
        return [blueprint.plan.position_of_stop(number) for number in numbers]
    return [unit.end for unit in blueprint.plan.units[: blueprint.stoppable]]
