"""The plots of gradient statistics: variance in the course of the training, and of single layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import plural
from analysis.presentation.figures.figure import Figure, axis, line, marks, names_axis
from analysis.presentation.figures.report_data import ReportData

#: Maximum number of trials with lines of their own; of more, mean and range are shown.
_MOST_TRIALS = 6
#: Maximum number of layers that are named beside their marks.
_MOST_LAYERS = 40
#: Maximum characters of a layer's name on the axis.
_MOST_LETTERS = 25
#: Maximum decades of a logarithmic axis with ticks between the powers of ten.
_MOST_DECADES = 3
#: Maximum points of a line with a mark each.
_MOST_MARKED = 60
#: Colours of estimators other than SGD, in the order of their appearance.
_COLOURS = ("@front", "@control", "@published", "@chosen", "@trial")


def gradient_noise(data: ReportData) -> Figure | None:
    """Return the plot of normalised variance by step, a line per estimator; None without statistics."""
    return _course(data, "normalised_variance", "gradient_noise")


def gradient_variance(data: ReportData) -> Figure | None:
    """Return the plot of average variance by step on a logarithmic axis; None without statistics above 0."""
    return _course(data, "average_variance", "gradient_variance", logarithmic=True)


def layer_noise(data: ReportData) -> Figure | None:
    """Return the plot of normalised variance by layer in one trial's last measurement; None without layers."""
    trial = shown_trial(data, data.gradients)
    if trial is None or data.gradients is None:
        return None
    rows = data.gradients[(data.gradients["trial"] == trial) & (data.gradients["layer"] != "")]
    rows = rows[rows["step"] == rows["step"].max()]
    layers = list(dict.fromkeys(rows["layer"]))
    rows = rows.assign(y=rows["layer"].map({name: place for place, name in enumerate(layers)}))
    rows = rows[np.isfinite(rows["normalised_variance"])]
    if rows.empty:
        return None
    step = int(rows["step"].iloc[0])
    traces = []
    for estimator, colour in _estimators(rows):
        own = rows[rows["estimator"] == estimator]
        values = [round(float(value), 6) for value in own["normalised_variance"]]
        labels = [
            f"{layer}\n{_name(estimator)}: {value:.3f}" for layer, value in zip(own["layer"], values, strict=True)
        ]
        points = pd.DataFrame({"x": values, "y": own["y"].to_list(), "label": labels})
        symbol = "circle-open" if estimator == "sgd" else "circle"
        traces.append(marks(_name(estimator), points, symbol, colour, size=9))
        traces[-1]["marker"]["line"] = {"width": 1.5, "color": colour}
    many = len(layers) > _MOST_LAYERS
    margin = max(0.5, len(layers) / _MOST_LAYERS)  # room for the first and the last mark
    names = [""] * len(layers) if many else [_both_ends(name) for name in layers]
    y_axis = names_axis(names, title="layers, the first at the top" if many else "", zeroline=False,
                        range=[len(layers) - 1 + margin, -margin])  # fmt: skip
    layout = {"xaxis": _to_one("normalised variance", rows["normalised_variance"]), "yaxis": y_axis}
    return Figure(
        name="layer_noise",
        alt=f"Normalised variance of the gradient of {plural(len(layers), 'layer')} of trial {trial} at step {step}.",
        traces=traces,
        layout=layout,
        height=110 + (480 if many else 20 * len(layers)),
        notes=[f"Trial {trial}, at its last measurement (step {step}); layers from the first to the last."],
    )


def shown_trial(data: ReportData, rows: pd.DataFrame | None) -> int | None:
    """Return the trial that stands for the study: the chosen one, or the first of the ranking that has such rows."""
    if rows is None or rows.empty:
        return None
    there = {int(trial) for trial in rows["trial"].unique()}
    chosen = [] if data.best is None else [int(data.best["trial"])]
    ranked = [int(trial) for trial in data.ranking["trial"]] if "trial" in data.ranking.columns else []
    return next((trial for trial in (*chosen, *ranked) if trial in there), min(there))


def _course(data: ReportData, column: str, name: str, *, logarithmic: bool = False) -> Figure | None:
    """Return the plot of a statistic of all layers together by step."""
    if data.gradients is None:
        return None
    rows = data.gradients[data.gradients["layer"] == ""]
    rows = rows[np.isfinite(rows[column]) & ((rows[column] > 0) | (not logarithmic))]
    if rows.empty:
        return None
    rows = rows.sort_values("step", kind="stable")
    shown = shown_trial(data, rows)
    trials = sorted({int(trial) for trial in rows["trial"]})
    traces, said = [], []
    for estimator, colour in _estimators(rows):
        own = rows[rows["estimator"] == estimator]
        dash = "dash" if estimator == "sgd" else "solid"
        by_step = own.groupby("step")[column]
        mean = by_step.mean()
        said.append(f"{_name(estimator)} {mean.iloc[0]:.3g} to {mean.iloc[-1]:.3g}")
        if len(trials) > _MOST_TRIALS:
            drawn = [("smallest", by_step.min(), 1.0), ("largest", by_step.max(), 1.0), ("mean", mean, 2.4)]
        else:
            series = {trial: group.groupby("step")[column].last() for trial, group in own.groupby("trial")}
            drawn = [(f"trial {trial}", s, 2.4 if trial == shown else 1.1) for trial, s in series.items()]
        drawn.sort(key=lambda entry: entry[2])  # the thickest on top
        for what, values, width in drawn:
            traces.append(_line(estimator, what, values, color=colour, width=width, dash=dash))
            traces[-1]["showlegend"] = what == drawn[-1][0]
    many = len(trials) > _MOST_TRIALS
    own_lines = f"the thick lines are trial {shown}'s" if len(trials) > 1 else f"trial {shown}"
    note = f"Mean of {len(trials)} trials (thick), smallest and largest." if many else f"{own_lines}."
    words = column.replace("_", " ")
    y_axis = _logarithmic(words, rows[column]) if logarithmic else _to_one(words, rows[column])
    return Figure(
        name=name,
        alt=f"{words[0].upper()}{words[1:]} of the gradient from the first measurement to the last, mean of "
        f"{plural(len(trials), 'trial')}: {', '.join(said)}.",
        traces=traces,
        layout={"xaxis": axis("step"), "yaxis": y_axis},
        height=380,
        notes=[note[0].upper() + note[1:]],
    )


def _to_one(title: str, values: pd.Series[float]) -> dict[str, Any]:
    """Return an axis from 0 to 1, or to the largest value above that."""
    return axis(title, range=[0, 1.04 * max(1.0, float(values.max()))])


def _logarithmic(title: str, values: pd.Series[float]) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at multiples of powers of ten, or at powers alone if there are many.

    Plotly's own ticks within a decade are digits without their power.
    """
    low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    digits = (1, 2, 3, 4, 5, 7) if high - low <= 1 else (1, 2, 5) if high - low <= _MOST_DECADES else (1,)
    ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in digits]
    first = max((tick for tick in ticks if tick <= values.min()), default=ticks[0])
    last = min((tick for tick in ticks if tick >= values.max()), default=ticks[-1])
    last = last if last > first else 10 * first
    ticks = [tick for tick in ticks if first <= tick <= last]
    names = [f"{tick:g}".replace("e-0", "e-").replace("e+0", "e+") for tick in ticks]
    ends = [math.log10(first) - 0.02, math.log10(last) + 0.02]
    return axis(title, type="log", tickvals=ticks, ticktext=names, range=ends)


def _line(estimator: str, what: str, values: pd.Series[float], **style: Any) -> dict[str, Any]:
    """Return the line of a trial, or of a mean, over steps."""
    steps, numbers = [int(step) for step in values.index], [float(f"{value:.6g}") for value in values]
    hover = [f"{_name(estimator)}, {what}\nstep {s}: {v:.3g}" for s, v in zip(steps, numbers, strict=True)]
    marked = style["width"] > 2 and len(steps) <= _MOST_MARKED
    more = {
        "mode": "lines+markers" if marked else "lines",
        "legendgroup": estimator,
        "opacity": 1 if style["width"] > 2 else 0.6,
        "marker": {"color": style["color"], "size": 5},
    }
    return line(_name(estimator), steps, numbers, hover, more=more, **style)


def _both_ends(name: str) -> str:
    """Shorten a layer's name from the middle: its ends tell where it is and what; the hover text has it whole.

    >>> _both_ends("features.3.convolution.with.a.long.name.weight")
    'features…long.name.weight'
    """
    return name if len(name) <= _MOST_LETTERS else f"{name[:8]}…{name[9 - _MOST_LETTERS :]}"


def _estimators(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the estimators and their colours, SGD first."""
    others = [str(name) for name in rows["estimator"].unique() if name != "sgd"]
    found = [(name, _COLOURS[place % len(_COLOURS)]) for place, name in enumerate(others)]
    return [*([("sgd", "@text")] if (rows["estimator"] == "sgd").any() else []), *found]


def _name(estimator: str) -> str:
    return "SGD" if estimator == "sgd" else estimator
