"""Weight variance of one trial's layers over its peak, as the variance rule saw it. Pure: a trace in, frames out.

The variance rule examines one layer at a time, at every n-th iteration, and measures the peak from the iteration at
which the layer became its target. Therefore a layer has two lines. The first shows the ratio to the peak since the
run's start, which the rule does not use. The second shows exactly the ratios that the rule compared with a threshold,
the last of them below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.presentation.figures.plain_columns import stop_events
from analysis.presentation.summary_text import config_of
from analysis.trace_replay.traces import RunTrace
from trainables.gradskip.replay import Unit, variance_name
from trainables.gradskip.rules.published_batch import Curve, examinations
from trainables.gradskip.rules.state_machine import first_step_after
from trainables.gradskip.settings import Settings


@dataclass(frozen=True, kw_only=True)
class VarianceFrames:
    """Frames of the variance picture, named as in `ReportData`."""

    variance: pd.DataFrame
    """Columns iteration, layer (name), ratio in [0, 1], examined (bool)."""
    stops: pd.DataFrame
    """Columns iteration, layer, ratio."""
    thresholds: pd.DataFrame
    """Columns name, value."""


def variance_frames(trace: RunTrace, row: pd.Series) -> VarianceFrames | None:
    """Return the variance picture's frames for one trial.

    Args:
        trace: recorded runs of its study (`analysis.load_trace`).
        row: the trial's row of `analysis.load` or of a ranking.

    Returns:
        The frames; None if the trace has no training of this trial or no variances, or if the trial only compresses.

    Raises:
        UserError: if the study has not recorded the trial's layer plan.
    """
    config = config_of(row)
    path = _path(trace, row)
    if path is None or (config.compresses and not config.skips_gradients):
        return None  # pruning's effect on weight variances is unrelated to a rule
    settings = config.gradskip_settings()
    blueprint = trace.blueprint(config)
    events = stop_events(row.get("stop_events"))
    automatic = config.method != "none" and settings.mode == "auto"
    names = blueprint.names or trace.layer_names
    found: list[pd.DataFrame] = []
    stops: list[dict[str, Any]] = []
    anchor: int | None = 0 if automatic else None  # iteration from which the current target is examined
    for unit in blueprint.plan.units[: blueprint.stoppable]:
        values = _values(trace, path, unit)
        if np.isnan(values).all():
            continue
        name = names[unit.number]
        stop = _stop_of(unit, events, blueprint.plan.order)
        lines = list(
            _lines(values, settings, anchor, stop, first=not found, single_precision=blueprint.single_precision)
        )
        found += [
            pd.DataFrame({"iteration": when, "layer": name, "ratio": ratio, "examined": examined})
            for when, ratio, examined in lines
        ]
        if stop is not None:
            stops.append({"iteration": stop, "layer": name, "ratio": float(lines[-1][1][-1]) if lines else np.nan})
        if anchor is not None:
            anchor = stop  # the next layer is examined from here on; None: this layer never stops
    if not found:
        return None
    return VarianceFrames(
        variance=pd.concat(found, ignore_index=True),
        stops=pd.DataFrame(stops, columns=["iteration", "layer", "ratio"]),
        thresholds=_thresholds(settings if automatic else None, len(events)),
    )


def _path(trace: RunTrace, row: pd.Series) -> list[int] | None:
    """Return the indices of the trial's stages, the dense run first; None if its training is not in the trace."""
    ids = {stage.id: place for place, stage in enumerate(trace.stages)}
    stage = row.get("stage")
    place: int | None = ids.get(str(stage)) if stage is not None and not pd.isna(stage) else None
    if place is None:
        return None
    path = []
    while place is not None:
        path.append(place)
        place = trace.stages[place].parent
    return path[::-1]


def _values(trace: RunTrace, path: list[int], unit: Unit) -> NDArray[np.float64]:
    """Return the layer's weight variance along the path, (T,); NaN where it was not recorded.

    A stage's signals replace those of its ancestors from its start on. Nothing is recorded after the layer has stopped.
    """
    values = np.full(trace.total_steps, np.nan)
    for place in path:
        stage = trace.stages[place]
        values[stage.start :] = np.nan
        recorded, there = stage.signal(variance_name(unit.watched))
        count = min(len(recorded), trace.total_steps - stage.start)
        span = slice(stage.start, stage.start + count)
        values[span] = np.where(there[:count], recorded[:count], np.nan)
    return values


def _stop_of(unit: Unit, events: list[dict[str, Any]], order: tuple[int, ...]) -> int | None:
    """Return the iteration of the first stop that includes this layer; None if it never stops."""
    for event in events:
        if order.index(int(event["layer"])) >= max(order.index(number) for number in unit.watched):
            return int(event["iteration"])
    return None


def _lines(
    values: NDArray[np.float64],
    settings: Settings,
    anchor: int | None,
    stop: int | None,
    *,
    first: bool,
    single_precision: bool,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64], bool]]:
    """Yield a layer's lines as (iterations, ratios, examined): first the part not examined, then the examined part."""
    end = len(values) if stop is None else min(stop + 1, len(values))
    looks: NDArray[np.int64] = np.zeros(0, np.int64)
    if anchor is not None:
        begin = anchor if first else first_step_after(anchor, settings.braking_distance)
        looks = examinations(
            begin=begin,
            end=end,
            start_itr=settings.start_itr,
            interval=settings.sampling_interval,
            anchor=None if first else anchor,
        )
    before = np.arange(end if len(looks) == 0 else looks[0] + 1)
    for when, examined in ((before, False), (looks, True)):
        kept = when[~np.isnan(values[when])]
        if len(kept):
            ratios = Curve.of(kept, values[kept], single_precision=single_precision).ratios
            yield kept, np.where(np.isinf(ratios), 1.0, ratios), examined  # 1: a new peak


def _thresholds(settings: Settings | None, stopped: int) -> pd.DataFrame:
    """Return the names and values of the thresholds that layers were compared with."""
    rows: list[tuple[str, float]] = []
    if settings is not None:
        rows.append(("CAC_VAR_START_THR", settings.start_thr))
        if stopped:
            rows += [("CAC_VAR_MT_THR", settings.mt_thr), ("CAC_VAR_SLOPE_THR", settings.slope_thr)]
    return pd.DataFrame(rows, columns=["name", "value"])
