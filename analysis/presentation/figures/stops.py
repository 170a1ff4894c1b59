"""The numbers of the plots of stops: stop timeline, weight variances. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.formatting import percent, plural
from analysis.presentation.figures.outcomes import Points, short_name
from analysis.presentation.figures.plain_columns import bare, is_one_of, number, numbers, stop_events, texts
from analysis.presentation.figures.report_data import ReportData

#: Maximum number of outcomes in the timeline.
MOST_ROWS = 30
#: Maximum number of points per line of the variance picture; more cannot be distinguished on a screen.
_MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Iterations of a run between two stops."""

    begin: int
    """Its first iteration."""
    end: int
    """The iteration after its last."""
    layer: int
    """Highest number among the stopped layers; -1 while every layer trains."""
    label: str
    """Its hover text."""


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    """One outcome of the timeline."""

    name: str
    """Its first trial, the number of equal trials and the compute saved."""
    stretches: list[Stretch]
    """From the first iteration to the last, without a gap."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Stops of layers over the iterations, best trial first."""

    rows: list[TimelineRow]
    """At most `MOST_ROWS` outcomes that stop something."""
    total_steps: int
    """Iterations of a whole run."""
    last_layer: int
    """Highest number among the layers stopped."""
    hidden: int
    """Outcomes that stop something but are left out."""
    without: int
    """Ranked trials that stop nothing."""


def timeline(data: ReportData) -> Timeline | None:
    """Return the stops of the best outcomes, with equal outcomes merged; None if no trial stopped a layer."""
    ranking = bare(data.ranking)[~is_one_of(data.ranking, "role", "baseline", "control")]
    groups: dict[tuple[Any, ...], list[int]] = {}
    events_of: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    without = 0
    for place, (_, row) in enumerate(ranking.iterrows()):
        events = stop_events(row.get("stop_events"))
        if not events:
            without += 1
            continue
        stops = [(int(e["iteration"]), int(e["layer"])) for e in events]
        key = (*stops, number(row, "compute_saved"), number(row, "accuracy"))
        groups.setdefault(key, []).append(place)
        events_of[key] = events
    if not groups:
        return None
    last = max(int(event["iteration"]) for events in events_of.values() for event in events)
    steps = numbers(data.ranking, "step")
    total = max(last + 1, int(np.nanmax(steps)) if np.isfinite(steps).any() else 0)
    rows = []
    for key, places in list(groups.items())[:MOST_ROWS]:
        first = ranking.iloc[places[0]]
        alike = f" +{len(places) - 1}" if len(places) > 1 else ""
        name = f"{first['trial']}{alike} · {percent(number(first, 'compute_saved'))}"
        rows.append(TimelineRow(name=name, stretches=_stretches(events_of[key], total, _who(ranking, places))))
    return Timeline(
        rows=rows,
        total_steps=total,
        last_layer=max(stretch.layer for row in rows for stretch in row.stretches),
        hidden=len(groups) - len(rows),
        without=without,
    )


def _who(ranking: Any, places: list[int]) -> str:
    first = ranking.iloc[places[0]]
    alike = f" and {plural(len(places) - 1, 'trial')} alike" if len(places) > 1 else ""
    return (
        f"trial {first['trial']}{alike}: compute saved {percent(number(first, 'compute_saved'))}, "
        f"accuracy {100 * number(first, 'accuracy'):.2f} %"
    )


def _stretches(events: list[dict[str, Any]], total: int, who: str) -> list[Stretch]:
    found = []
    layer, begin, what = -1, 0, "every layer trains"
    for event in [*events, None]:
        end = total if event is None else min(total, int(event["iteration"]))
        if end > begin:
            label = f"{who}\niterations {begin} to {end - 1}: {what}"
            found.append(Stretch(begin=begin, end=end, layer=layer, label=label))
            begin = end
        if event is not None:
            layer = max(layer, int(event["layer"]))
            ratio = event.get("ratio")
            seen = f", ratio {ratio:.4f}" if isinstance(ratio, (int, float)) else ""
            name = event.get("name") or f"layer {event['layer']}"
            what = f"stopped through {name} ({event.get('rule', 'stop')}{seen})"
    return found


@dataclass(frozen=True, kw_only=True)
class VarianceLine:
    """One layer's weight variance over its running peak."""

    layer: str
    """The layer's name."""
    place: float
    """Its place among the layers, 0 first, 1 last."""
    examined: bool
    """True for each iteration at which the rule examined the layer."""
    iteration: list[int]
    """Iterations of the ratios."""
    ratio: list[float]
    """The ratio, at most 1."""


@dataclass(frozen=True, kw_only=True)
class Variance:
    """Weight variances and stops of layers in the chosen trial."""

    lines: list[VarianceLine]
    """Lines of the layers from first to last; for each layer, the line not examined comes before the examined one."""
    layers: list[str]
    """Names of the layers in this order."""
    stops: Points
    """Stops of the layers (x iteration, y ratio)."""
    thresholds: list[tuple[str, float]]
    """Name and value of each threshold."""
    y_range: tuple[float, float]
    """Initial range of ratios."""


def variance(data: ReportData) -> Variance | None:
    """Return the variance picture; None if no variances were recorded."""
    frame = data.variance
    if frame is None or len(frame) == 0:
        return None
    names = texts(frame, "layer")
    iteration, ratio = numbers(frame, "iteration"), numbers(frame, "ratio")
    examined = numbers(frame, "examined") == 1 if "examined" in frame.columns else np.ones(len(frame), dtype=bool)
    layers = list(dict.fromkeys(names))
    group_of = np.array([layers.index(name) for name in names])
    known = np.isfinite(iteration) & np.isfinite(ratio)
    lines = []
    for number_, layer in enumerate(layers):
        for looked in (False, True):
            places = np.flatnonzero((group_of == number_) & (examined == looked) & known)
            if len(places) == 0:
                continue
            places = _thinned(places[np.argsort(iteration[places], kind="stable")])
            lines.append(
                VarianceLine(
                    layer=layer,
                    place=number_ / max(1, len(layers) - 1),
                    examined=looked,
                    iteration=[int(v) for v in iteration[places]],
                    ratio=[round(float(v), 6) for v in ratio[places]],
                )
            )
    if not lines:
        return None
    thresholds = _thresholds(data)
    stops = _stops(data)
    lowest = min([*stops.y, *(value for _, value in thresholds)], default=1.0)
    seen = min(min(line.ratio) for line in lines)
    # The decisive ratios are near 1; including layers that shrink to 0 later would compress them to a line.
    low = max(seen, min(lowest, 1.0) - 2 * max(1 - lowest, 0.02))
    return Variance(
        lines=lines,
        layers=layers,
        stops=stops,
        thresholds=thresholds,
        y_range=(low - 0.06 * (1 - low + 0.01), 1 + 0.06 * (1 - low + 0.01)),
    )


def _thinned(places: np.ndarray) -> np.ndarray:
    """Return every n-th element and always the last, because the line may end there at a stop."""
    stride = -(-len(places) // _MOST_POINTS)
    kept = places[::stride]
    return kept if kept[-1] == places[-1] else np.append(kept, places[-1])


def _stops(data: ReportData) -> Points:
    if data.stops is None:
        return Points(x=[], y=[], labels=[], counts=[])
    iteration, ratio, names = (
        numbers(data.stops, "iteration"), numbers(data.stops, "ratio"), texts(data.stops, "layer"),
    )  # fmt: skip
    places = np.flatnonzero(np.isfinite(iteration) & np.isfinite(ratio))
    return Points(
        x=[float(iteration[i]) for i in places],
        y=[float(ratio[i]) for i in places],
        labels=[f"{names[i]} stopped\niteration {int(iteration[i])}, ratio {ratio[i]:.4f}" for i in places],
        counts=[1] * len(places),
    )


def _thresholds(data: ReportData) -> list[tuple[str, float]]:
    if data.thresholds is None:
        return []
    values = numbers(data.thresholds, "value")
    return [(n, float(v)) for n, v in zip(texts(data.thresholds, "name"), values, strict=True) if np.isfinite(v)]


def near_thresholds(thresholds: Sequence[tuple[str, float]], y_range: tuple[float, float]) -> list[tuple[str, float]]:
    """Return labels of thresholds with their positions; thresholds too close for separate labels share one."""
    near = 0.05 * (y_range[1] - y_range[0])
    groups: list[list[tuple[str, float]]] = []
    for name, value in sorted(thresholds, key=lambda threshold: threshold[1]):
        if groups and value - groups[-1][-1][1] < near:
            groups[-1].append((name, value))
        else:
            groups.append([(name, value)])
    return [(", ".join(f"{short_name(name)} {value:.4g}" for name, value in group), group[-1][1]) for group in groups]
