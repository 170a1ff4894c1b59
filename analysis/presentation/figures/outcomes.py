"""The plots that compare outcomes: Pareto picture, confirmation, importance.

Here and in `figures.report_figures` a plot is None if there is nothing to draw. The axes show percentages and points
(of accuracy, 0.01 each), the frames of `ReportData` contain fractions; a metric that is no fraction is drawn in its own
unit. Axes of a metric that is minimised are reversed, so that up is better.
"""

from __future__ import annotations

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
    value_with_unit,
)
from analysis.io.checked import array_of, number_of
from analysis.metrics.confirmation import compared, retrained_saving
from analysis.metrics.ranking import dense_alike, is_shorter
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.figures.figure import (
    Axis,
    Figure,
    Points,
    is_one_of,
    marks,
    metric_values,
    names_axis,
    percent_values,
    saved,
    texts,
)
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.summary_text import settings_text, trial_numbers
from trainables.quality import Quality
from trainables.savings import TIME, TRAINING, saved_words

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
    ranking, quality = data.ranking, data.quality
    if len(ranking) == 0:
        return None

    def of_role(*roles: str) -> pd.DataFrame:
        return _outcomes(ranking[is_one_of(ranking, "role", *roles)])

    is_control = is_one_of(ranking, "role", "control")
    trials = _outcomes(ranking[~is_control & ~is_one_of(ranking, "role", "baseline", "published")])
    baseline, published = of_role("baseline"), of_role("published")
    front = _by_x(_outcomes(ranking[(array_of(ranking, "on_front") == 1) & ~is_control]), quality)
    chosen = _outcomes(ranking.iloc[:0] if data.best is None else data.best.to_frame().T)
    shorter = _cut_dense_runs(data.controls if data.saving == TRAINING else None, quality)
    if len(shorter) and data.controls is not None:  # the line begins at full length, trained as the cut runs
        alike = dense_alike(ranking, data.controls[is_shorter(data.controls)].iloc[0])
        full = baseline if alike is None else _outcomes(ranking.loc[alike[:1]])
        shorter = _by_x(pd.concat([full, shorter]), quality)
    sizes = [min(16.0, 6 + 2 * n**0.5) for n in trials["count"]]
    traces = [
        marks("trials", trials, "o", "@trial", size=sizes, opacity=0.9),
        marks("Pareto front", front, "o", "@front", size=8, line_width=2, steps=True),
    ]
    if len(shorter):
        traces.append(marks("cut dense runs", shorter, "v", "@control", size=9, line_width=2, dashed=True))
    for name, group, symbol, colour, size in (
        ("published defaults", published, "D", "@published", 11),
        ("baseline", baseline, "s", "@text", 10),
        ("chosen", chosen, "*", "@chosen", 17),
    ):
        if len(group):
            traces.append(marks(name, group, symbol, colour, size=size))
    lost = quality.sign * float(plotted(data.allowed, quality))
    limits = [] if len(baseline) == 0 else [float(baseline["y"].mean()) - lost]
    references = [*baseline["y"], *shorter["y"], *chosen["y"], *limits] or [front["y"].iloc[0]]
    y_range = _y_range(references, [*trials["y"], *front["y"]], quality)
    others = pd.concat([trials, published])
    x_range = _x_range(list(others["x"]), [*baseline["x"], *shorter["x"], *front["x"]])
    below = quality.sign * (others["y"] - y_range[0]) < 0
    left = others["x"] < (-np.inf if x_range is None else x_range[0])
    cost = "training time" if data.saving == TIME else "compute"
    notes = ["Up and to the right is better. Point at a mark to see its trials; of equal outcomes one mark is drawn."]
    for hidden, where in ((below, "below the picture"), (left, f"left of it, at many times the dense run's {cost}")):
        if count := int(others.loc[hidden, "count"].sum()):
            verb = "lies" if count == 1 else "lie"
            notes.append(f"{plural(count, 'trial')} {verb} {where}.")
    reach = ""
    if len(front):
        x, y = max(zip(front["x"], front["y"], strict=True))
        value = plotted_text(y, quality)
        named = f"{value} {quality.name}" if quality.is_fraction else f"{quality.name} {value}"
        reach = f", reaching {x:.1f} % {data.saved_words} at {named}"
    return Figure(
        name="pareto",
        alt=f"{data.saved_words.capitalize()} against {metric_words(quality)} of "
        f"{plural(int(trials['count'].sum()), 'searched trial')}. "
        f"The Pareto front has {plural(len(front), 'outcome')}{reach}.",
        traces=traces,
        x=Axis(title=f"{data.saved_words} (%)", range=x_range),
        y=Axis(title=axis_words(quality), range=y_range),
        limits={f"allowed {drop_words(quality)}": value for value in limits},
        height=480,
        notes=notes,
    )


def _x_range(trials: list[float], others: list[float]) -> tuple[float, float] | None:
    """Return the range of the saving, in percent; None where all of it can be shown.

    Methods that cost more than they save may cost hundreds of dense runs. Trials that cost more than `_FAR` times as
    much as half of the costly ones are left out.
    """
    costly = [-x for x in trials if x < 0]
    if not costly or max(costly) <= (most := _FAR * max(100.0, float(np.median(costly)))):
        return None
    shown = [x for x in [*trials, *others, 0.0] if -x <= most]
    margin = _MARGIN / 2 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


def _y_range(references: list[float], others: list[float], quality: Quality) -> tuple[float, float]:
    """Return the range of the metric as plotted, the worse end first.

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
    return quality.sign * (low - margin), quality.sign * top


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
    quality, role = quality_of(first), str(first.get("role") or "")
    drop = number_of(first, quality.drop)
    lost = "" if np.isnan(drop) else f", {drop_words(quality)} {drop_text(drop, quality)}"
    lines = [
        f"{trial_numbers(trials)}{f' ({role})' if role not in ('', 'search') else ''}",
        f"{saved_words(saving_of(first))} {percent(saved_of_one(first))}",
        f"{quality.name} {value_with_unit(number_of(first, quality.name), quality)}{lost}",
    ]
    settings = settings_text(first)
    if settings != "-":
        lines += wrap(settings, 44, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _cut_dense_runs(controls: pd.DataFrame | None, quality: Quality) -> pd.DataFrame:
    """Return the points of the cut dense runs, by compute saved."""
    runs = pd.DataFrame() if controls is None else controls[is_shorter(controls)]
    compute, value = array_of(runs, "compute_saved"), array_of(runs, quality.name)
    epochs = ["" if np.isnan(n) else f" ({n:.0f} epochs)" for n in array_of(runs, "epochs")]
    labels = [
        f"control: cut dense run{length}\ncompute saved {percent(x)}\n{quality.name} {value_with_unit(y, quality)}"
        for length, x, y in zip(epochs, compute, value, strict=True)
    ]
    found = pd.DataFrame({"x": percent_values(compute), "y": metric_values(value, quality)})
    return _by_x(found.assign(label=labels, count=1)[np.isfinite(compute) & np.isfinite(value)], quality)


def _by_x(points: pd.DataFrame, quality: Quality) -> pd.DataFrame:
    return points.sort_values(["x", "y"], ascending=[True, quality.direction == "min"], kind="stable")


def confirmation(data: ReportData) -> Figure | None:
    """Return the plot of the metric's drops on fresh seeds with intervals; None if no candidate was retrained."""
    frame = data.confirmation
    if frame is None or len(frame) == 0:
        return None
    quality, words = data.quality, drop_words(data.quality)
    names = [f"trial {name}" for name in texts(frame, "candidate")]
    labels = []
    for name, (_, row) in zip(names, frame.iterrows(), strict=True):
        low, high = (drop_text(row[end], quality, allowed=data.allowed) for end in ("drop_low", "drop_high"))
        labels.append(
            f"{name}: {'confirmed' if row['confirmed'] else 'not confirmed'}\n"
            f"{data.saved_words} {percent(retrained_saving(row))}\n"
            f"{words} {drop_text(row[quality.drop], quality, allowed=data.allowed)}, "
            f"{100 * row['confidence']:.0f} % interval {low} to {high}\n{plural(int(row['seeds']), 'seed')}"
        )
    drop, below, above = (
        np.array(metric_values(array_of(frame, name), quality)) for name in (quality.drop, "drop_low", "drop_high")
    )
    found = pd.DataFrame(
        {"x": drop, "y": range(len(frame)), "label": labels, "above": above - drop, "below": drop - below}
    )
    confirmed = array_of(frame, "confirmed") == 1
    traces = []
    for name, group, hollow, colour in (
        ("confirmed", found[confirmed], False, "@chosen"),
        ("not confirmed", found[~confirmed], True, "@control"),
    ):
        if len(group):
            ends = {"below": group["below"].tolist(), "above": group["above"].tolist()}
            traces.append(marks(name, group, "o", colour, size=11, hollow=hollow, **ends))
    allowed, y_axis = float(plotted(data.allowed, quality)), names_axis(names)
    traces.append(Points(name=f"allowed {words}", x=(allowed, allowed), y=y_axis.range or (), colour="@limit",
                         line_width=1.4, dashed=True))  # fmt: skip
    drop_axis = "loss of test accuracy" if quality.is_accuracy else f"{words}, {compared(frame.iloc[0])}"
    return Figure(
        name="confirmation",
        alt=f"{words[0].upper()}{words[1:]} with its interval: {confirmed.sum()} of {len(frame)} candidates are "
        "confirmed.",
        traces=traces,
        x=Axis(title=f"{drop_axis}{drop_unit(quality)}", zero_line=True),
        y=y_axis,
        height=150 + 36 * len(frame),
        notes=[f"A candidate is confirmed when the upper end of its interval is within the allowed {words}."],
    )
