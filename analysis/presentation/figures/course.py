"""The plots of convergence, cost and learning curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import ROUNDING, percent
from analysis.io.checked import array_of
from analysis.metrics.accounting import own_fraction, search_fraction
from analysis.metrics.drops import given_away, reference_of
from analysis.presentation.figures.figure import Figure, axis, line, marks
from analysis.presentation.figures.plain_columns import is_one_of, metric_values, percent_values, saved
from analysis.presentation.figures.report_data import ReportData
from analysis.quality_words import axis_words, drop_text, drop_words, metric_words, plotted, plotted_text, unit_of_drop
from trainables.quality import Quality

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
