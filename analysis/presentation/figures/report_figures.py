"""All plots of the report, and that of stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import percent, plural, value_with_unit
from analysis.io.checked import array_of, number_of
from analysis.presentation.figures.figure import Axis, Bars, Figure, depth, is_one_of, names_axis, stop_events
from analysis.presentation.figures.gradient_noise import gradient_noise, gradient_variance, layer_noise
from analysis.presentation.figures.outcomes import confirmation, pareto
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.stage_tree import stage_tree

#: Maximum number of outcomes in the timeline.
MOST_ROWS = 30


def timeline(data: ReportData) -> Figure | None:
    """Return the stops of the best outcomes, with equal outcomes merged; None if no trial stopped a layer."""
    ranking = data.ranking[~is_one_of(data.ranking, "role", "baseline", "control")]
    outcomes: dict[tuple[Any, ...], list[pd.Series]] = {}
    without, last = 0, 0
    for _, row in ranking.iterrows():
        stops = [(int(e["iteration"]), int(e["layer"])) for e in stop_events(row.get("stop_events"))]
        if not stops:
            without += 1
            continue
        key = (*stops, number_of(row, "compute_saved"), number_of(row, data.quality.name))
        outcomes.setdefault(key, []).append(row)
        last = max(last, stops[-1][0])
    if not outcomes:
        return None
    steps = array_of(data.ranking, "step")
    total = max(last + 1, int(np.nanmax(steps)) if np.isfinite(steps).any() else 0)
    names: list[str] = []
    stretches: list[dict[str, Any]] = []
    for alike in list(outcomes.values())[:MOST_ROWS]:
        first, others = alike[0], len(alike) - 1
        share = percent(number_of(first, "compute_saved"))
        value = value_with_unit(number_of(first, data.quality.name), data.quality)
        also = f" and {plural(others, 'trial')} alike" if others else ""
        who = f"trial {first['trial']}{also}: compute saved {share}, {data.quality.name} {value}"
        events, own = stop_events(first["stop_events"]), number_of(first, "step")
        # A run of fewer epochs ends earlier.
        end = total if np.isnan(own) else min(total, max(int(own), int(events[-1]["iteration"]) + 1))
        stretches += [{"row": len(names), **stretch} for stretch in _stretches(events, end, who)]
        names.append(f"{first['trial']}{f' +{others}' if others else ''} · {share}")
    notes = [
        "A row an outcome, best first: trial, how many trials are alike, compute saved. Grey: every layer trains; "
        "the colour tells how far layers have stopped, by their numbers."
    ]
    if hidden := len(outcomes) - len(names):
        notes.append(f"{plural(hidden, 'more outcome')} not shown.")
    if without:
        notes.append(f"{plural(without, 'ranked trial')} stopped nothing.")
    most = max(1, *(stretch["layer"] for stretch in stretches))
    scale = sorted({round(most * step / 4) for step in range(5)})
    return Figure(
        name="timeline",
        alt=f"When layers stopped in the {plural(len(names), 'best outcome')} of {total} iterations.",
        traces=[
            Bars(
                rows=[s["row"] for s in stretches],
                begins=[s["begin"] for s in stretches],
                lengths=[s["end"] - s["begin"] for s in stretches],
                labels=[s["label"] for s in stretches],
                colours=["@rest" if s["layer"] < 0 else depth(s["layer"], most + 1) for s in stretches],
            )
        ],
        x=Axis(title="iteration", range=(0, total)),
        y=names_axis(names, title="trial · compute saved"),
        swatches={f"up to layer {n}": depth(n, most + 1) for n in scale},
        height=170 + 22 * max(3, len(names)),
        notes=notes,
    )


def _stretches(events: list[dict[str, Any]], total: int, who: str) -> list[dict[str, Any]]:
    """Return one outcome's stretches between stops, from the first iteration to the last, without a gap.

    Each has its begin, end, label and the highest number among the stopped layers, -1 for none.
    """
    found = []
    layer, begin, what = -1, 0, "every layer trains"
    for event in [*events, None]:
        end = total if event is None else min(total, int(event["iteration"]))
        if end > begin:
            label = f"{who}\niterations {begin} to {end - 1}: {what}"
            found.append({"begin": begin, "end": end, "layer": layer, "label": label})
            begin = end
        if event is not None:
            layer = max(layer, int(event["layer"]))
            ratio = event.get("ratio")
            seen = f", ratio {ratio:.4f}" if isinstance(ratio, (int, float)) else ""
            name = event.get("name") or f"layer {event['layer']}"
            what = f"stopped through {name} ({event.get('rule', 'stop')}{seen})"
    return found


_MAKERS = (
    pareto, confirmation, timeline, gradient_noise, gradient_variance, layer_noise,
    lambda data: stage_tree(data.stages),
)  # fmt: skip


def report_figures(data: ReportData) -> dict[str, Figure]:
    """Return all plots that have data, by name."""
    found = (make(data) for make in _MAKERS)
    return {figure.name: figure for figure in found if figure is not None}
