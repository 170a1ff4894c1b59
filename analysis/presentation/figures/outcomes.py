"""The plots that compare outcomes: Pareto picture, confirmation, importance.

Here and in `figures.report_figures` a plot is None if there is nothing to draw. The axes show percentages and points
(of accuracy, 0.01 each), the frames of `ReportData` contain fractions; a metric that is no fraction is drawn in its own
unit. Axes of a metric that is minimised are reversed, so that up is better.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from textwrap import wrap

import numpy as np
import pandas as pd

from analysis.formatting import (
    axis_words,
    drop_text,
    drop_unit,
    drop_words,
    metric_words,
    percent,
    plotted,
    plotted_text,
    plural,
    short_name,
    value_with_unit,
)
from analysis.io.checked import array_of, number_of
from analysis.metrics.confirmation import compared, saved_again
from analysis.metrics.ranking import CONTROL_NAMES
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.figures.figure import (
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
    texts,
)
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.summary_text import settings_text, trial_numbers
from trainables.quality import Quality
from trainables.savings import TIME, TRAINING, saved_words

#: Maximum number of bars per objective in the plot of importance.
_MOST_BARS = 10
#: Margin above and below, as a share of the range of values shown.
_MARGIN = 0.12
#: Trials that cost this many times the median of the costly ones are left of the Pareto picture.
_FAR = 3.0
#: Minimum reach below the worst reference outcome of the Pareto picture, if it has trials: points of accuracy, or
#: percent of another metric's value.
_LEAST_REACH = 3.0


def pareto(data: ReportData) -> Figure | None:
    """Return the plot of the saving that the study ranks by against the metric; None if no trial completed.

    Trials with the same outcome are one mark. Controls, which any setting has to beat, are shown if the study ranks by
    training compute.
    """
    ranking = bare(data.ranking)
    if len(ranking) == 0:
        return None
    is_control = is_one_of(ranking, "role", "control")
    trials = _outcomes(ranking[~is_one_of(ranking, "role", "baseline", "published", "control")])
    baseline = _outcomes(ranking[is_one_of(ranking, "role", "baseline")])
    published = _outcomes(ranking[is_one_of(ranking, "role", "published")])
    quality = data.quality
    front = _by_x(_outcomes(ranking[(array_of(ranking, "on_front") == 1) & ~is_control]), quality)
    chosen = _outcomes(ranking.iloc[:0] if data.best is None else data.best.to_frame().T)
    shorter, random_stops = _controls(data.controls if data.saving == TRAINING else None, quality)
    if len(shorter):
        shorter = _by_x(pd.concat([baseline, shorter]), quality)  # the line begins at the full length
    sizes = [min(16.0, 6 + 2 * n**0.5) for n in trials["count"]]
    traces = [
        marks("trials", trials, "circle", "@trial", size=sizes, opacity=0.9),
        marks("Pareto front", front, "circle", "@front", size=8, mode="lines+markers",
              line={"color": "@front", "width": 2, "shape": "vh"}),
    ]  # fmt: skip
    if len(shorter):
        dashed = {"color": "@control", "width": 2, "dash": "dash"}
        traces.append(
            marks("cut dense runs", shorter, "triangle-down", "@control", size=9, mode="lines+markers", line=dashed)
        )
    for name, group, symbol, colour, size in (
        ("random stops", random_stops, "x", "@control", 9),
        ("published defaults", published, "diamond", "@published", 11),
        ("baseline", baseline, "square", "@text", 10),
        ("chosen", chosen, "star", "@chosen", 17),
    ):
        if len(group):
            traces.append(marks(name, group, symbol, colour, size=size))
    lost = quality.sign * float(plotted(data.allowed, quality))
    limits = [] if len(baseline) == 0 else [float(baseline["y"].mean()) - lost]
    references = [*baseline["y"], *shorter["y"], *chosen["y"], *limits] or [front["y"].iloc[0]]
    y_range = _y_range(references, [*trials["y"], *front["y"]], quality)
    groups = (trials, published, random_stops)
    x_range = _x_range(
        [*trials["x"], *published["x"], *random_stops["x"]], [*baseline["x"], *shorter["x"], *front["x"]]
    )
    layout = {
        "xaxis": axis(f"{data.saved_words} (%)", **({} if x_range is None else {"range": x_range})),
        "yaxis": axis(axis_words(quality), range=y_range),
        "shapes": [limit(value) for value in limits],
        "annotations": [note(f"allowed {drop_words(quality)}", x=0, y=value) for value in limits],
    }
    notes = ["Up and to the right is better. Point at a mark to see its trials; of equal outcomes one mark is drawn."]
    below = sum(int(group.loc[quality.sign * (group["y"] - y_range[0]) < 0, "count"].sum()) for group in groups)
    left = 0 if x_range is None else sum(int(group.loc[group["x"] < x_range[0], "count"].sum()) for group in groups)
    cost = "training time" if data.saving == TIME else "compute"
    for count, where in ((below, "below the picture"), (left, f"left of it, at many times the dense run's {cost}")):
        if count:
            said = "1 trial lies" if count == 1 else f"{count} trials lie"
            notes.append(f"{said} {where}; a double click shows all.")
    best = max(zip(front["x"], front["y"], strict=True), default=None)
    reach = "" if best is None else f", reaching {best[0]:.1f} % {data.saved_words} at {_shown(best[1], quality)}"
    alt = (
        f"{data.saved_words.capitalize()} against {metric_words(quality)} of "
        f"{plural(int(trials['count'].sum()), 'searched trial')}. "
        f"The Pareto front has {plural(len(front), 'outcome')}{reach}."
    )
    return Figure(name="pareto", alt=alt, traces=traces, layout=layout, height=480, notes=notes)


def _shown(y: float, quality: Quality) -> str:
    """Return a value as it is plotted, with its unit and the metric's name."""
    value = plotted_text(y, quality)
    return f"{value} {quality.name}" if quality.is_fraction else f"{quality.name} {value}"


def _x_range(trials: list[float], others: list[float]) -> list[float] | None:
    """Return the initial range of the saving, in percent; None where all of it can be shown.

    Methods that cost more than they save may cost hundreds of dense runs. Trials that cost more than `_FAR` times as
    much as half of the costly ones are left out at first.
    """
    costly = [-x for x in trials if x < 0]
    if not costly or max(costly) <= (most := _FAR * max(100.0, float(np.median(costly)))):
        return None
    shown = [x for x in [*trials, *others, 0.0] if -x <= most]
    margin = _MARGIN / 2 * (max(shown) - min(shown))
    return [min(shown) - margin, max(shown) + margin]


def _y_range(references: list[float], others: list[float], quality: Quality) -> list[float]:
    """Return the initial range of the metric as plotted, the worse end first.

    The range contains all references (baseline, shorter training, chosen trial), and of the others those that are not
    too far below them.
    """
    references, others = ([quality.sign * y for y in values] for values in (references, others))
    low, high = min(references), max(references)
    least = _LEAST_REACH if quality.is_fraction else _LEAST_REACH / 100 * max(abs(low), abs(high))
    shown = [*references, *(y for y in others if y >= low - max(2 * (high - low), least))]
    low, high = min(shown), max(shown)
    margin = _MARGIN * (high - low + least / 30)
    top = min(100.5, high + margin) if quality.is_fraction and quality.direction == "max" else high + margin
    return [quality.sign * (low - margin), quality.sign * top]


def _outcomes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one point for all trials with the same outcome: x (saving, %), y (metric), label, count."""
    quality = quality_of(rows)
    trials = rows["trial"].tolist()
    found = pd.DataFrame({"x": percent_values(saved(rows)), "y": metric_values(array_of(rows, quality.name), quality)})
    found = found[np.isfinite(found["x"]) & np.isfinite(found["y"])]
    places = [group.index for _, group in found.groupby(["x", "y"], sort=False)]
    found = found.drop_duplicates()
    found["label"] = [_outcome_label(rows.iloc[alike[0]], [trials[p] for p in alike]) for alike in places]
    found["count"] = [len(alike) for alike in places]
    return found


def _outcome_label(first: pd.Series, trials: list[int]) -> str:
    role = str(first.get("role") or "")
    beside = f" ({role})" if role not in ("", "search") else ""
    lines = [f"{trial_numbers(trials)}{beside}"]
    lines.append(f"{saved_words(saving_of(first))} {percent(saved_of_one(first))}")
    quality = quality_of(first)
    drop = number_of(first, quality.drop)
    beside = "" if np.isnan(drop) else f", {drop_words(quality)} {drop_text(drop, quality)}"
    lines.append(f"{quality.name} {value_with_unit(number_of(first, quality.name), quality)}{beside}")
    settings = settings_text(first)
    if settings not in ("", "-"):
        lines += wrap(settings, 44, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _controls(controls: pd.DataFrame | None, quality: Quality) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the points of the shortened dense trainings and those of the other controls, by compute saved."""
    if controls is None:
        controls = pd.DataFrame()
    names = texts(controls, "control")
    compute, value = array_of(controls, "compute_saved"), array_of(controls, quality.name)
    epochs = ["" if np.isnan(n) else f" ({n:.0f} epochs)" for n in array_of(controls, "epochs")]
    labels = [
        f"control: {CONTROL_NAMES.get(name, name)}{length}\ncompute saved {percent(x)}\n"
        f"{quality.name} {value_with_unit(y, quality)}"
        for name, length, x, y in zip(names, epochs, compute, value, strict=True)
    ]
    found = pd.DataFrame({"x": percent_values(compute), "y": metric_values(value, quality)})
    found = found.assign(label=labels, count=1)
    known = np.isfinite(compute) & np.isfinite(value)
    cut = np.array([name.startswith("shorter") for name in names], dtype=bool)
    return _by_x(found[known & cut], quality), _by_x(found[known & ~cut], quality)


def _by_x(points: pd.DataFrame, quality: Quality) -> pd.DataFrame:
    return points.sort_values(["x", "y"], ascending=[True, quality.direction == "min"], kind="stable")


def confirmation(data: ReportData) -> Figure | None:
    """Return the plot of the metric's drops on fresh seeds with intervals; None if no candidate was retrained."""
    frame = data.confirmation
    if frame is None or len(frame) == 0:
        return None
    quality, words = data.quality, drop_words(data.quality)
    drop, low, high = (array_of(frame, name) for name in (quality.drop, "drop_low", "drop_high"))
    share = [saved_again(row) for _, row in frame.iterrows()]
    seeds, confidence = array_of(frame, "seeds"), array_of(frame, "confidence")
    confirmed = array_of(frame, "confirmed") == 1
    candidates = [f"trial {name}" for name in texts(frame, "candidate")]
    labels = [
        f"{candidates[i]}: {'confirmed' if confirmed[i] else 'not confirmed'}\n"
        f"{data.saved_words} {percent(share[i])}\n"
        f"{words} {drop_text(drop[i], quality, allowed=data.allowed)}, {100 * confidence[i]:.0f} % interval "
        f"{drop_text(low[i], quality)} to {drop_text(high[i], quality, allowed=data.allowed)}\n"
        f"{plural(int(seeds[i]) if np.isfinite(seeds[i]) else 0, 'seed')}"
        for i in range(len(frame))
    ]
    found = pd.DataFrame({"x": metric_values(drop, quality), "y": range(len(frame)), "label": labels})
    found["above"], found["below"] = metric_values(high, quality) - found["x"], found["x"] - metric_values(low, quality)
    traces = []
    for name, group, symbol, colour in (
        ("confirmed", found[confirmed], "circle", "@chosen"),
        ("not confirmed", found[~confirmed], "circle-open", "@control"),
    ):
        if len(group):
            spread = {
                "type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 7,
                "array": group["above"].tolist(), "arrayminus": group["below"].tolist(),
            }  # fmt: skip
            traces.append(marks(name, group, symbol, colour, size=11, error_x=spread))
            traces[-1]["marker"]["line"] = {"width": 2, "color": colour}
    ends, allowed = [-0.6, len(frame) - 0.4], [float(plotted(data.allowed, quality))] * 2
    traces.append(line(f"allowed {words}", allowed, ends, [], color="@limit", width=1.4, dash="dash"))
    layout = {
        "xaxis": axis(f"{_drop_axis(frame.iloc[0], quality)}{drop_unit(quality)}", zeroline=True),
        "yaxis": names_axis(candidates, range=ends[::-1], zeroline=False),
    }
    alt = (
        f"{words[0].upper()}{words[1:]} with its interval: {confirmed.sum()} of {len(frame)} candidates are confirmed."
    )
    notes = ["A candidate is confirmed when the upper end of its interval is within the allowed " + words + "."]
    height = 150 + 36 * len(frame)
    return Figure(name="confirmation", alt=alt, traces=traces, layout=layout, height=height, notes=notes)


def _drop_axis(row: pd.Series, quality: Quality) -> str:
    return "loss of test accuracy" if quality.is_accuracy else f"{drop_words(quality)}, {compared(row)}"


def importance(data: ReportData) -> Figure | None:
    """Return the plot of each parameter's share of each objective's explained variance; None if it is unknown."""
    return _bars(
        "importance", data.importance, "importance", "Importance of parameters", "importance (share)", 30,
        lambda frame: [short_name(n) for n in texts(frame, "parameter")],
    )  # fmt: skip


def _bars(
    name: str, frame: pd.DataFrame | None, column: str, what: str, share: str, row_height: float,
    names_of: Callable[[pd.DataFrame], list[str]],
) -> Figure | None:  # fmt: skip
    """Return grouped bars of all objectives over one list of names, in the order of the first objective.

    Args:
        name: name of the plot.
        frame: one row per objective and bar.
        column: its column of the bars' lengths.
        what: what is shown, for the text alternative.
        share: title of the axis of lengths.
        row_height: pixels per name.
        names_of: function of a frame's rows to their names.
    """
    if frame is None or len(frame) == 0:
        return None
    explained = frame.attrs.get("explained", {})
    bars: dict[str, dict[str, float]] = {}
    for objective in dict.fromkeys(texts(frame, "objective")):
        rows = frame[is_one_of(frame, "objective", objective)]
        values = dict(zip(names_of(rows), array_of(rows, column), strict=True))
        greatest = sorted((n for n in values if np.isfinite(values[n])), key=lambda n: -values[n])[:_MOST_BARS]
        if greatest:
            bars[objective] = {n: float(values[n]) for n in greatest}
    if not bars:
        return None
    names = list(dict.fromkeys(n for values in bars.values() for n in values))
    traces = []
    for (objective, values), colour in zip(bars.items(), cycle(("@front", "@control", "@published")), strict=False):
        title = objective.replace("_", " ")
        if objective in explained:
            title += f": shares of {percent(explained[objective])} of its variance"
        shown = [n for n in names if n in values]
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": title, "y": [names.index(n) for n in shown],
                "x": [values[n] for n in shown], "marker": {"color": colour}, "hoverinfo": "text",
                "hovertext": [f"{n}\n{share} for {objective}: {values[n]:.3f}" for n in shown],
            }
        )  # fmt: skip
    labels = [short(n.replace(" × ", " ×\n")) for n in names]  # noqa: RUF001
    layout = {
        "barmode": "group", "bargap": 0.3, "xaxis": axis(share, rangemode="tozero"),
        "yaxis": names_axis(labels, autorange="reversed"),
    }  # fmt: skip
    first, values = next(iter(bars.items()))
    alt = f"{what}: for {first} most of all {names[0]} ({percent(values[names[0]])})."
    height = round(130 + row_height * max(2, len(names)))
    return Figure(name=name, alt=alt, traces=traces, layout=layout, height=height)
