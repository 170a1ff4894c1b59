"""All plots of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import (
    ROUNDING,
    axis_words,
    drop_text,
    drop_words,
    metric_words,
    percent,
    plotted,
    plotted_text,
    plural,
    short_name,
    unit_of_drop,
    value_with_unit,
)
from analysis.io.checked import array_of, number_of
from analysis.metrics.accounting import own_fraction, search_fraction
from analysis.metrics.ranking import given_away, reference_of
from analysis.presentation.figures.figure import (
    MOST_NAMED,
    Figure,
    axis,
    bare,
    is_one_of,
    limit,
    line,
    marks,
    metric_values,
    names_axis,
    note,
    percent_values,
    saved,
    short,
    stop_events,
    texts,
)
from analysis.presentation.figures.outcomes import confirmation, importance, pareto
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.stage_tree import stage_tree
from analysis.presentation.figures.variance import gradient_noise, gradient_variance, layer_noise
from trainables.quality import Quality

# --- The plots of stops: stop timeline, weight variances --------------------------------------------------------------

#: Maximum number of outcomes in the timeline.
MOST_ROWS = 30
#: Maximum number of points per line of the variance picture; more cannot be distinguished on a screen.
_MOST_POINTS = 400
#: Maximum number of points of a line that are marked.
_MOST_MARKED = 60


class _Stretch(NamedTuple):
    """Iterations of a run between two stops."""

    row: int
    """Its row of the timeline."""
    begin: int
    """Its first iteration."""
    end: int
    """The iteration after its last."""
    layer: int
    """Highest number among the stopped layers; -1 while every layer trains."""
    label: str
    """Its hover text."""


def timeline(data: ReportData) -> Figure | None:
    """Return the stops of the best outcomes, with equal outcomes merged; None if no trial stopped a layer."""
    ranking = bare(data.ranking)[~is_one_of(data.ranking, "role", "baseline", "control")]
    outcomes: dict[tuple[Any, ...], list[int]] = {}
    without = last = 0
    for place, (_, row) in enumerate(ranking.iterrows()):
        events = stop_events(row.get("stop_events"))
        if not events:
            without += 1
            continue
        stops = [(int(e["iteration"]), int(e["layer"])) for e in events]
        key = (*stops, number_of(row, "compute_saved"), number_of(row, data.quality.name))
        outcomes.setdefault(key, []).append(place)
        last = max(last, int(events[-1]["iteration"]))
    if not outcomes:
        return None
    steps = array_of(data.ranking, "step")
    total = max(last + 1, int(np.nanmax(steps)) if np.isfinite(steps).any() else 0)
    names: list[str] = []
    stretches: list[_Stretch] = []
    for places in list(outcomes.values())[:MOST_ROWS]:
        first, others = ranking.iloc[places[0]], len(places) - 1
        saved = percent(number_of(first, "compute_saved"))
        value = value_with_unit(number_of(first, data.quality.name), data.quality)
        alike = f" and {plural(others, 'trial')} alike" if others else ""
        who = f"trial {first['trial']}{alike}: compute saved {saved}, {data.quality.name} {value}"
        events, own = stop_events(first["stop_events"]), number_of(first, "step")
        # A run of fewer epochs ends earlier.
        end = total if np.isnan(own) else min(total, max(int(own), int(events[-1]["iteration"]) + 1))
        stretches += _stretches(len(names), events, end, who)
        names.append(f"{first['trial']}{f' +{others}' if others else ''} · {saved}")
    hidden = len(outcomes) - len(names)
    notes = [
        "A row an outcome, best first: trial, how many trials are alike, compute saved. Grey: every layer trains; "
        "the colour tells how far layers have stopped."
    ]
    if hidden:
        notes.append(f"{plural(hidden, 'more outcome')} not shown.")
    if without:
        notes.append(f"{plural(without, 'ranked trial')} stopped nothing.")
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": axis("iteration", range=[0, total]),
        "yaxis": names_axis(names, title="trial · compute saved", autorange="reversed", zeroline=False),
        "margin": {"t": 70},
    }
    return Figure(
        name="timeline", traces=_timeline_traces(stretches), layout=layout, height=170 + 22 * max(3, len(names)),
        alt=f"When layers stopped in the {plural(len(names), 'best outcome')} of {total} iterations.", notes=notes,
    )  # fmt: skip


def _stretches(row: int, events: list[dict[str, Any]], total: int, who: str) -> list[_Stretch]:
    """Return one outcome's stretches from the first iteration to the last, without a gap."""
    found = []
    layer, begin, what = -1, 0, "every layer trains"
    for event in [*events, None]:
        end = total if event is None else min(total, int(event["iteration"]))
        if end > begin:
            label = f"{who}\niterations {begin} to {end - 1}: {what}"
            found.append(_Stretch(row, begin, end, layer, label))
            begin = end
        if event is not None:
            layer = max(layer, int(event["layer"]))
            ratio = event.get("ratio")
            seen = f", ratio {ratio:.4f}" if isinstance(ratio, (int, float)) else ""
            name = event.get("name") or f"layer {event['layer']}"
            what = f"stopped through {name} ({event.get('rule', 'stop')}{seen})"
    return found


def _timeline_traces(stretches: list[_Stretch]) -> list[dict[str, Any]]:
    most = max(1, *(s.layer for s in stretches))
    training = [s for s in stretches if s.layer < 0]
    stopped = [s for s in stretches if s.layer >= 0]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False,
            "y": [s.row for s in those], "x": [s.end - s.begin for s in those], "base": [s.begin for s in those],
            "hovertext": [s.label for s in those],
            "marker": {"color": colour, "line": {"width": 1, "color": "@ground"}},
        }
        for those, colour in ((training, "@rest"), (stopped, [f"@depth:{s.layer / most:.3f}" for s in stopped]))
    ]  # fmt: skip
    # The colour scale belongs to a trace without points because Plotly complains about bars with numeric colours.
    bar = {
        "title": {"text": "stopped through layer number", "side": "top", "font": {"size": 12}}, "orientation": "h",
        "thickness": 10, "len": 0.6, "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "outlinewidth": 0,
        "tickformat": "d", "nticks": 6,
    }  # fmt: skip
    scale = {"color": [0], "colorscale": "@depth", "cmin": 0, "cmax": most, "showscale": True, "colorbar": bar}
    empty = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip", "showlegend": False}
    return [*traces, empty | {"marker": scale}]


def variance(data: ReportData) -> Figure | None:
    """Return the plot of weight variances of the chosen trial; None if none were recorded.

    For each layer, from first to last, the line not examined by the rule comes before the examined one.
    """
    frame = data.variance
    if frame is None or len(frame) == 0:
        return None
    examined = array_of(frame, "examined") == 1 if "examined" in frame.columns else np.ones(len(frame), dtype=bool)
    rows = pd.DataFrame(
        {"layer": texts(frame, "layer"), "examined": examined, "x": array_of(frame, "iteration"),
         "y": array_of(frame, "ratio")}
    )  # fmt: skip
    layers = list(dict.fromkeys(rows["layer"]))
    rows = rows[np.isfinite(rows["x"]) & np.isfinite(rows["y"])].sort_values("x", kind="stable")
    if rows.empty:
        return None
    groups = dict(list(rows.groupby(["layer", "examined"], sort=False)))
    keys = [(layer, looked) for layer in layers for looked in (False, True) if (layer, looked) in groups]
    lines = [_thinned(groups[key]) for key in keys]
    last_of = dict(keys)  # True if the layer has an examined line, which comes last
    traces = [
        _variance_line(
            group, layers.index(layer), len(layers), named=len(layers) <= MOST_NAMED and looked == last_of[layer]
        )
        for (layer, looked), group in zip(keys, lines, strict=True)
    ]
    thresholds, stops = _thresholds(data), _stops(data)
    if len(stops):
        traces.append(marks("stopped", stops, "x", "@text", size=10))
    lowest = min([*stops["y"], *(value for _, value in thresholds)], default=1.0)
    # The decisive ratios are near 1; including layers that shrink to 0 later would compress them to a line.
    low = max(min(group["y"].min() for group in lines), min(lowest, 1.0) - 2 * max(1 - lowest, 0.02))
    margin = 0.06 * (1 - low + 0.01)
    y_range = (low - margin, 1 + margin)
    layout = {
        "xaxis": axis("iteration"),
        "yaxis": axis("weight variance / its peak", range=list(y_range)),
        "shapes": [limit(value) for value in sorted({value for _, value in thresholds})],
        "annotations": [note(text, x=1, y=value) for text, value in near_thresholds(thresholds, y_range)],
    }
    alt = f"Weight variance over its running peak of {plural(len(layers), 'layer')}; {len(stops)} stopped."
    notes = [
        "A layer stops when its line falls below a threshold. Solid: examined by the rule, against the peak since the "
        "layer became its target; dotted: not examined yet, against the peak since the run's start."
    ]
    return Figure(name="variance", alt=alt, traces=traces, layout=layout, height=460, notes=notes)


def _variance_line(group: pd.DataFrame, place: int, layers: int, *, named: bool) -> dict[str, Any]:
    """Return the trace of one layer's ratios, either those examined or the others."""
    layer, examined = group["layer"].iloc[0], bool(group["examined"].iloc[0])
    iterations, ratios = [int(v) for v in group["x"]], [round(float(v), 6) for v in group["y"]]
    words = f"{layer}{'' if examined else ' (not examined yet)'}"
    colour = f"@depth:{place / max(1, layers - 1):.3f}"
    more = {
        "mode": "lines+markers" if examined and len(group) <= _MOST_MARKED else "lines",
        "legendgroup": f"layer {place}",
        "showlegend": named,
        "opacity": 1 if examined else 0.55,
        "marker": {"color": colour, "size": 4},
    }
    return line(
        short(layer), iterations, ratios,
        [f"{words}\niteration {i}, ratio {r:.4f}" for i, r in zip(iterations, ratios, strict=True)],
        more=more, color=colour, width=2.4 if examined else 1.1, dash="solid" if examined else "dot",
    )  # fmt: skip


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every n-th row and always the last, because the line may end there at a stop."""
    kept = np.arange(0, len(rows), -(-len(rows) // _MOST_POINTS))
    return rows.iloc[np.union1d(kept, len(rows) - 1)]


def _stops(data: ReportData) -> pd.DataFrame:
    """Return the points at which layers stopped: x (iteration), y (ratio), label."""
    stops = pd.DataFrame() if data.stops is None else data.stops
    names = texts(stops, "layer")
    found = pd.DataFrame({"x": array_of(stops, "iteration"), "y": array_of(stops, "ratio"), "layer": names})
    found = found[np.isfinite(found["x"]) & np.isfinite(found["y"])]
    labels = [f"{row.layer} stopped\niteration {int(row.x)}, ratio {row.y:.4f}" for row in found.itertuples()]
    return found.assign(label=labels)


def _thresholds(data: ReportData) -> list[tuple[str, float]]:
    if data.thresholds is None:
        return []
    values = array_of(data.thresholds, "value")
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


# --- The plots of convergence, cost and learning curves ---------------------------------------------------------------

#: Maximum number of learning curves in addition to the baseline's and the chosen trial's.
_MOST_CURVES = 12
#: Colour, width, dash and opacity of the learning curves of each kind of trial.
_CURVES = {
    "trial": ("@trial", 1, "solid", 0.6),
    "baseline": ("@text", 2.2, "dash", 1),
    "chosen": ("@chosen", 2.6, "solid", 1),
}


def convergence(data: ReportData) -> Figure | None:
    """Return the plot of savings and the largest saving so far by trial; None if no trial completed."""
    trial, share, drop = _completed(data)
    if len(trial) == 0:
        return None
    quality, words = data.quality, drop_words(data.quality)
    within = drop <= data.allowed + ROUNDING  # False for NaN, that is, without a baseline
    best = percent_values(np.maximum.accumulate(np.where(within, np.maximum(share, 0.0), 0.0)))
    labels = [
        f"trial {t}\n{data.saved_words} {percent(s)}" + ("" if np.isnan(d) else f"\n{words} {drop_text(d, quality)}")
        for t, s, d in zip(trial, share, drop, strict=True)
    ]
    outcomes = pd.DataFrame({"x": trial, "y": percent_values(share), "label": labels})
    traces = []
    for name, group, symbol, colour in (
        (f"over the allowed {words}", outcomes[~within], "circle-open", "@trial"),
        (f"within the allowed {words}", outcomes[within], "circle", "@front"),
    ):
        if len(group):
            traces.append(marks(name, group, symbol, colour, size=6))
            traces[-1]["marker"]["line"] = {"width": 1, "color": colour}
    hover = [f"trial {t}: best so far {b:.1f} %" for t, b in zip(trial, best, strict=True)]
    traces.append(line("best so far", trial, best, hover, color="@chosen", width=2.4, shape="hv"))
    saving = data.saved_words
    alt = f"Best {saving} within the allowed {words} by trial: {best[-1]:.1f} % after {len(trial)} trials."
    layout = {"xaxis": _trial_axis(trial), "yaxis": axis(f"{saving} (%)")}
    return Figure(name="convergence", alt=alt, traces=traces, layout=layout, height=400)


def hypervolume(data: ReportData) -> Figure | None:
    """Return the plot of the dominated area by trial; None if no trial or no baseline completed.

    The area is in % compute x points of accuracy; the reference point is nothing saved at the baseline's accuracy minus
    5 points, or 5 % of the value of a metric that is no fraction.
    """
    trial, share, drop = _completed(data)
    if not np.isfinite(drop).any():
        return None
    quality, baseline = data.quality, reference_of(data.trials)
    given = plotted(given_away(quality, baseline), quality)
    areas = _areas(share, given - plotted(drop, quality))
    hover = [f"trial {t}: {v:.1f}" for t, v in zip(trial, areas, strict=True)]
    more = {"showlegend": False}
    traces = [line("hypervolume", trial, areas, hover, more=more, color="@front", width=2.4, shape="hv")]
    unit = unit_of_drop(quality) or quality.name
    layout = {"xaxis": _trial_axis(trial), "yaxis": axis(f"hypervolume (% × {unit})", rangemode="tozero")}  # noqa: RUF001
    alt = f"Hypervolume dominated by the trials so far: {areas[-1]:.1f} after {len(trial)} trials."
    end = (
        "accuracy less 5 points"
        if quality.is_accuracy
        else f"{quality.name}, {drop_text(given_away(quality, baseline), quality)} worse"
    )
    notes = [f"Area under the Pareto front, above nothing saved and the baseline's {end}."]
    return Figure(name="hypervolume", alt=alt, traces=traces, layout=layout, height=360, notes=notes)


def _completed(data: ReportData) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Return number, saving and drop of the completed trials but the controls, by number."""
    counted = is_one_of(data.trials, "status", "completed") & ~is_one_of(data.trials, "role", "control")
    rows = data.trials[counted].sort_values("trial")
    share, drop = saved(rows), array_of(rows, data.quality.drop)
    known = np.isfinite(share)
    return [int(trial) for trial in rows["trial"][known]], share[known], drop[known]


def _areas(saved: NDArray[np.float64], gain: NDArray[np.float64]) -> list[float]:
    """Compute the dominated area after each trial; keeps the front, so the cost per trial depends on its length.

    Args:
        saved: (N,) fractions.
        gain: (N,) distances of the metric from the reference, as plotted.
    """
    front: list[tuple[float, float]] = []
    areas: list[float] = []
    for x, y in zip(100 * saved, gain, strict=True):
        dominated = not (x > 0 and y > 0) or any(a >= x and b >= y for a, b in front)
        if not dominated:
            front = sorted([(a, b) for a, b in front if a > x or b > y] + [(float(x), float(y))])
        if dominated and areas:
            areas.append(areas[-1])
            continue
        left = np.array([0.0] + [a for a, _ in front])
        areas.append(round(float(np.sum(np.diff(left) * np.array([b for _, b in front]))), 6))
    return areas


def cost(data: ReportData) -> Figure | None:
    """Return the plot of the search's cumulative compute by trial, in full trainings; None if it is unknown."""
    rows = data.trials.sort_values("trial")
    executed = np.asarray(search_fraction(rows), dtype=np.float64)
    alone = np.asarray(own_fraction(rows), dtype=np.float64)
    known = np.isfinite(executed)
    if not known.any():
        return None
    trial = [int(trial) for trial in rows["trial"][known]]
    traces, ends = [], []
    for name, values, colour, dash in (
        ("each trial alone", alone, "@trial", "dash"),
        ("executed by the search", executed, "@front", "solid"),
    ):
        total = [round(float(v), 6) for v in np.cumsum(np.nan_to_num(values[known]))]
        hover = [f"up to trial {t}: {v:.1f} ({name})" for t, v in zip(trial, total, strict=True)]
        traces.append(line(name, trial, total, hover, color=colour, width=2.4, dash=dash))
        ends.append(total[-1])
    layout = {"xaxis": _trial_axis(trial), "yaxis": axis("compute (full trainings)", rangemode="tozero")}
    alt = f"Compute of the search: {ends[1]:.1f} full trainings executed, {ends[0]:.1f} trained alone."
    return Figure(name="cost", alt=alt, traces=traces, layout=layout, height=360)


def _trial_axis(trials: list[int]) -> dict[str, Any]:
    """Return the axis of trial numbers, with ticks at integers only."""
    return axis("trial", dtick=1) if trials[-1] - trials[0] < 10 else axis("trial")


def learning_curves(data: ReportData) -> Figure | None:
    """Return the plot of the best other trials of the ranking, the baseline and the chosen trial; None without rows."""
    if data.history is None or len(data.history) == 0:
        return None
    quality = data.quality
    names = {"trial": "trial", "epoch": "epoch", "value": quality.name}
    rows = pd.DataFrame({name: array_of(data.history, column) for name, column in names.items()})
    kinds = _kinds(data)
    finite = np.isfinite(rows["epoch"]) & np.isfinite(rows["value"])
    rows = rows[finite & rows["trial"].isin(kinds)].sort_values("epoch", kind="stable")
    rows["value"] = metric_values(rows["value"].to_numpy(), quality)
    if rows.empty:
        return None
    traces: list[dict[str, Any]] = []
    named = []
    for trial, kind in kinds.items():
        epochs, values = rows.loc[rows["trial"] == trial, ["epoch", "value"]].to_numpy().T
        if len(epochs) == 0:
            continue
        colour, width, dash, opacity = _CURVES[kind]
        name = f"trial {trial}" + (f" ({kind})" if kind != "trial" else "")
        named += [name] if kind != "trial" else []
        hover = [f"{name}\nepoch {e:.0f}: {plotted_text(v, quality)}" for e, v in zip(epochs, values, strict=True)]
        first = kind not in [trace["legendgroup"] for trace in traces]
        more = {"legendgroup": kind, "showlegend": kind != "trial" or first, "opacity": opacity}
        entry = "best of the others" if kind == "trial" else name
        traces.append(line(entry, epochs, values, hover, more=more, color=colour, width=width, dash=dash))
    layout = {"xaxis": axis("epoch"), "yaxis": axis(axis_words(quality), range=_value_range(rows, quality))}
    words = metric_words(quality)
    return Figure(
        name="learning", alt=f"{words[0].upper()}{words[1:]} after each epoch: {', '.join(named)}.", traces=traces,
        layout=layout, height=400, notes=["The first epochs may lie below the picture; a double click shows all."],
    )  # fmt: skip


def _kinds(data: ReportData) -> dict[int, str]:
    """Return the trials whose curves are shown and their kinds, in drawing order."""
    chosen = None if data.best is None else int(data.best["trial"])
    baselines = [int(trial) for trial in data.trials["trial"][is_one_of(data.trials, "role", "baseline")]]
    others = [int(t) for t in data.ranking["trial"] if int(t) not in (chosen, *baselines)][:_MOST_CURVES]
    kinds = dict.fromkeys(reversed(others), "trial") | dict.fromkeys(baselines, "baseline")
    return kinds if chosen is None or chosen in baselines else kinds | {chosen: "chosen"}


def _value_range(rows: pd.DataFrame, quality: Quality) -> list[float]:
    """Return the initial range of the metric, worse end first: this end ignores the first quarter of the epochs."""
    good = quality.sign * rows["value"]
    low, high = good[rows["epoch"] >= rows["epoch"].max() / 4].min(), good.max()
    margin = 0.05 * (high - low) + (0.05 if quality.is_fraction else 1e-3 * abs(high))
    return [quality.sign * float(low - margin), quality.sign * float(high + margin)]


# --- All plots of the report ------------------------------------------------------------------------------------------


_MAKERS = (
    pareto, confirmation, timeline, variance, learning_curves, gradient_noise, gradient_variance, layer_noise,
    importance, convergence, hypervolume, cost, lambda data: stage_tree(data.stages),
)  # fmt: skip


def report_figures(data: ReportData) -> dict[str, Figure]:
    """Return all plots that have data, by name."""
    found = (make(data) for make in _MAKERS)
    return {figure.name: figure for figure in found if figure is not None}
