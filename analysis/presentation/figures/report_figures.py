"""All plots of the report, and those of stops and of the search's course."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from analysis.metrics.pareto import hypervolume as area_above
from analysis.metrics.pareto import non_dominated
from analysis.metrics.ranking import given_away, reference_of
from analysis.presentation.figures.figure import (
    MOST_MARKED,
    MOST_NAMED,
    Figure,
    axis,
    bars,
    depth,
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

#: Maximum number of outcomes in the timeline.
MOST_ROWS = 30
#: Maximum number of points per line of the variance picture; more cannot be distinguished on a screen.
_MOST_POINTS = 400
#: Maximum number of learning curves in addition to the baseline's and the chosen trial's.
_MOST_CURVES = 12
#: Colour, width, dash and opacity of the learning curves of each kind of trial.
_CURVES = {
    "trial": ("@trial", 1, "solid", 0.6),
    "baseline": ("@text", 2.2, "dash", 1),
    "chosen": ("@chosen", 2.6, "solid", 1),
}

# --- The plots of stops: stop timeline, weight variances --------------------------------------------------------------


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
        "the colour tells how far layers have stopped."
    ]
    if hidden := len(outcomes) - len(names):
        notes.append(f"{plural(hidden, 'more outcome')} not shown.")
    if without:
        notes.append(f"{plural(without, 'ranked trial')} stopped nothing.")
    return Figure(
        name="timeline",
        alt=f"When layers stopped in the {plural(len(names), 'best outcome')} of {total} iterations.",
        traces=_timeline_traces(pd.DataFrame(stretches)),
        layout={
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": axis("iteration", range=[0, total]),
            "yaxis": names_axis(names, title="trial · compute saved", autorange="reversed", zeroline=False),
            "margin": {"t": 70},
        },
        height=170 + 22 * max(3, len(names)),
        notes=notes,
    )


def _stretches(events: list[dict[str, Any]], total: int, who: str) -> list[dict[str, Any]]:
    """Return one outcome's stretches between stops, from the first iteration to the last, without a gap.

    Returns:
        For each stretch its begin, end, label and the highest number among the stopped layers, -1 for none.
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


def _timeline_traces(stretches: pd.DataFrame) -> list[dict[str, Any]]:
    most = max(1, int(stretches["layer"].max()))
    colours = np.array(["@rest" if layer < 0 else depth(layer, most + 1) for layer in stretches["layer"]])
    traces = [
        bars(those["row"].tolist(), those["begin"].tolist(), (those["end"] - those["begin"]).tolist(),
             those["label"].tolist(), colours[those.index].tolist(), line={"width": 1, "color": "@ground"})
        for those in (stretches[stretches["layer"] < 0], stretches[stretches["layer"] >= 0])
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
    traces, low = [], 1.0
    for place, layer in enumerate(layers):
        looks = [looked for looked in (False, True) if (layer, looked) in groups]
        for looked in looks:
            group = _thinned(groups[layer, looked])
            low = min(low, float(group["y"].min()))
            named = len(layers) <= MOST_NAMED and looked == looks[-1]
            traces.append(_variance_line(group, layer, depth(place, len(layers)), examined=looked, named=named))
    stops = _stops(data)
    if len(stops):
        traces.append(marks("stopped", stops, "x", "@text", size=10))
    thresholds = pd.DataFrame() if data.thresholds is None else data.thresholds
    limits = dict(zip(texts(thresholds, "name"), array_of(thresholds, "value").tolist(), strict=True))
    lowest = min([*stops["y"], *limits.values()], default=1.0)
    # The decisive ratios are near 1; including layers that shrink to 0 later would compress them to a line.
    low = max(low, min(lowest, 1.0) - 2 * max(1 - lowest, 0.02))
    margin = 0.06 * (1 - low + 0.01)
    y_range = (low - margin, 1 + margin)
    return Figure(
        name="variance",
        alt=f"Weight variance over its running peak of {plural(len(layers), 'layer')}; {len(stops)} stopped.",
        traces=traces,
        layout={
            "xaxis": axis("iteration"),
            "yaxis": axis("weight variance / its peak", range=list(y_range)),
            "shapes": [limit(value) for value in sorted(set(limits.values()))],
            "annotations": [note(text, x=1, y=value) for text, value in _near_limits(limits, y_range)],
        },
        height=460,
        notes=[
            "A layer stops when its line falls below a threshold. Solid: examined by the rule, against the peak since "
            "the layer became its target; dotted: not examined yet, against the peak since the run's start."
        ],
    )


def _variance_line(group: pd.DataFrame, layer: str, colour: str, *, examined: bool, named: bool) -> dict[str, Any]:
    """Return the trace of one layer's ratios, either those examined or the others."""
    iterations, ratios = [int(v) for v in group["x"]], [round(float(v), 6) for v in group["y"]]
    words = f"{layer}{'' if examined else ' (not examined yet)'}"
    more = {
        "mode": "lines+markers" if examined and len(group) <= MOST_MARKED else "lines",
        "legendgroup": layer,
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


def _near_limits(limits: dict[str, float], y_range: tuple[float, float]) -> list[tuple[str, float]]:
    """Return labels of thresholds with their positions; thresholds too close for separate labels share one."""
    near = 0.05 * (y_range[1] - y_range[0])
    groups: list[list[tuple[str, float]]] = []
    for name, value in sorted(limits.items(), key=lambda named: named[1]):
        if groups and value - groups[-1][-1][1] < near:
            groups[-1].append((name, value))
        else:
            groups.append([(name, value)])
    return [(", ".join(f"{short_name(name)} {value:.4g}" for name, value in group), group[-1][1]) for group in groups]


# --- The plots of the search's course: best saving, hypervolume, cost, learning curves --------------------------------


def convergence(data: ReportData) -> Figure | None:
    """Return the plot of savings and the largest saving so far by trial; None if no trial completed."""
    trial, share, drop = _completed(data)
    if len(trial) == 0:
        return None
    quality, words, saving = data.quality, drop_words(data.quality), data.saved_words
    within = drop <= data.allowed + ROUNDING  # False for NaN, that is, without a baseline
    best = percent_values(np.maximum.accumulate(np.where(within, np.maximum(share, 0.0), 0.0)))
    labels = [
        f"trial {t}\n{saving} {percent(s)}" + ("" if np.isnan(d) else f"\n{words} {drop_text(d, quality)}")
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
    hover = [f"trial {t}: best so far {b:.1f} %" for t, b in zip(trial, best, strict=True)]
    traces.append(line("best so far", trial, best, hover, color="@chosen", width=2.4, shape="hv"))
    return Figure(
        name="convergence",
        alt=f"Best {saving} within the allowed {words} by trial: {best[-1]:.1f} % after {len(trial)} trials.",
        traces=traces,
        layout={"xaxis": _trial_axis(trial), "yaxis": axis(f"{saving} (%)")},
        height=400,
    )


def hypervolume(data: ReportData) -> Figure | None:
    """Return the plot of the dominated area by trial; None if no trial or no baseline completed.

    The area is in % compute x points of accuracy; the reference point is nothing saved at the baseline's accuracy minus
    5 points, or 5 % of the value of a metric that is no fraction.
    """
    trial, share, drop = _completed(data)
    if not np.isfinite(drop).any():
        return None
    quality = data.quality
    given = given_away(quality, reference_of(data.trials))
    points = np.column_stack([100 * share, plotted(given, quality) - plotted(drop, quality)])
    front, areas = np.zeros((0, 2)), []
    for point in points:
        if np.isfinite(point).all():
            front = np.vstack([front, point])
            front = front[non_dominated(front)]
        areas.append(round(area_above(front, (0.0, 0.0)), 6))
    hover = [f"trial {t}: {v:.1f}" for t, v in zip(trial, areas, strict=True)]
    more = {"showlegend": False}
    traces = [line("hypervolume", trial, areas, hover, more=more, color="@front", width=2.4, shape="hv")]
    unit = unit_of_drop(quality) or quality.name
    layout = {"xaxis": _trial_axis(trial), "yaxis": axis(f"hypervolume (% × {unit})", rangemode="tozero")}  # noqa: RUF001
    end = "accuracy less 5 points" if quality.is_accuracy else f"{quality.name}, {drop_text(given, quality)} worse"
    return Figure(
        name="hypervolume",
        alt=f"Hypervolume dominated by the trials so far: {areas[-1]:.1f} after {len(trial)} trials.",
        traces=traces,
        layout=layout,
        height=360,
        notes=[f"Area under the Pareto front, above nothing saved and the baseline's {end}."],
    )


def _completed(data: ReportData) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Return number, saving and drop of the completed trials but the controls, by number."""
    counted = is_one_of(data.trials, "status", "completed") & ~is_one_of(data.trials, "role", "control")
    rows = data.trials[counted].sort_values("trial")
    share, drop = saved(rows), array_of(rows, data.quality.drop)
    known = np.isfinite(share)
    return [int(trial) for trial in rows["trial"][known]], share[known], drop[known]


def cost(data: ReportData) -> Figure | None:
    """Return the plot of the search's cumulative compute by trial, in full trainings; None if it is unknown."""
    rows = data.trials.sort_values("trial")
    executed, alone = (np.asarray(share(rows), dtype=np.float64) for share in (search_fraction, own_fraction))
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


def _trial_axis(trials: Sequence[int]) -> dict[str, Any]:
    """Return the axis of trial numbers, with ticks at integers only."""
    return axis("trial", dtick=1) if trials[-1] - trials[0] < 10 else axis("trial")


def learning_curves(data: ReportData) -> Figure | None:
    """Return the plot of the best other trials of the ranking, the baseline and the chosen trial; None without rows."""
    if data.history is None or len(data.history) == 0:
        return None
    quality, kinds = data.quality, _kinds(data)
    names = {"trial": "trial", "epoch": "epoch", "value": quality.name}
    rows = pd.DataFrame({name: array_of(data.history, column) for name, column in names.items()})
    finite = np.isfinite(rows.to_numpy()).all(axis=1)
    rows = rows[finite & rows["trial"].isin(kinds)].sort_values("epoch", kind="stable")
    rows["value"] = metric_values(rows["value"].to_numpy(), quality)
    if rows.empty:
        return None
    traces: list[dict[str, Any]] = []
    named = []
    for trial, kind in kinds.items():
        own = rows[rows["trial"] == trial]
        if own.empty:
            continue
        colour, width, dash, opacity = _CURVES[kind]
        name = f"trial {trial}" + (f" ({kind})" if kind != "trial" else "")
        named += [name] if kind != "trial" else []
        epochs, values = own["epoch"].tolist(), own["value"].tolist()
        hover = [f"{name}\nepoch {e:.0f}: {plotted_text(v, quality)}" for e, v in zip(epochs, values, strict=True)]
        first = kind not in [trace["legendgroup"] for trace in traces]
        more = {"legendgroup": kind, "showlegend": kind != "trial" or first, "opacity": opacity}
        entry = "best of the others" if kind == "trial" else name
        traces.append(line(entry, epochs, values, hover, more=more, color=colour, width=width, dash=dash))
    words = metric_words(quality)
    return Figure(
        name="learning",
        alt=f"{words[0].upper()}{words[1:]} after each epoch: {', '.join(named)}.",
        traces=traces,
        layout={"xaxis": axis("epoch"), "yaxis": axis(axis_words(quality), range=_value_range(rows, quality))},
        height=400,
        notes=["The first epochs may lie below the picture; a double click shows all."],
    )


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
