"""The plots of gradient statistics: variance in the course of the training, and of single layers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.formatting import plural
from analysis.presentation.figures.figure import MOST_MARKED, Axis, Figure, Points, marks, names_axis
from analysis.presentation.figures.report_data import ReportData

#: Maximum number of trials with lines of their own; of more, mean and range are shown.
_MOST_TRIALS = 6
#: Maximum number of layers that are named beside their marks, and of characters of a name.
_MOST_LAYERS, _MOST_LETTERS = 40, 25
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
    rows = rows.assign(
        x=rows["normalised_variance"].round(6), y=rows["layer"].map({name: place for place, name in enumerate(layers)})
    )
    rows = rows[np.isfinite(rows["x"])]
    if rows.empty:
        return None
    step = int(rows["step"].iloc[0])
    traces = []
    for estimator, name, colour in _estimators(rows):
        own = rows[rows["estimator"] == estimator]
        labels = [f"{layer}\n{name}: {value:.3f}" for layer, value in zip(own["layer"], own["x"], strict=True)]
        traces.append(marks(name, own.assign(label=labels), "o", colour, size=9, hollow=estimator == "sgd"))
    many = len(layers) > _MOST_LAYERS
    margin = max(0.5, len(layers) / _MOST_LAYERS)  # room for the first and the last mark
    names = [""] * len(layers) if many else [_both_ends(name) for name in layers]
    y_axis = names_axis(names, title="layers, the first at the top" if many else "", margin=margin)
    return Figure(
        name="layer_noise",
        alt=f"Normalised variance of the gradient of {plural(len(layers), 'layer')} of trial {trial} at step {step}.",
        traces=traces,
        x=_to_one("normalised variance", rows["x"]),
        y=y_axis,
        height=110 + (480 if many else 20 * len(layers)),
        notes=[f"Trial {trial}, at its last measurement (step {step}); layers from the first to the last."],
    )


def shown_trial(data: ReportData, rows: pd.DataFrame | None) -> int | None:
    """Return the trial that stands for the study: the chosen one, or the first of the ranking that has such rows."""
    if rows is None or rows.empty:
        return None
    there = {int(trial) for trial in rows["trial"].unique()}
    chosen = [] if data.best is None else [data.best["trial"]]
    return next((int(trial) for trial in (*chosen, *data.ranking.get("trial", ())) if trial in there), min(there))


def _course(data: ReportData, column: str, name: str, *, logarithmic: bool = False) -> Figure | None:
    if data.gradients is None:
        return None
    rows = data.gradients[data.gradients["layer"] == ""]
    rows = rows[np.isfinite(rows[column]) & ((rows[column] > 0) | (not logarithmic))]
    if rows.empty:
        return None
    rows = rows.sort_values("step", kind="stable")
    shown = shown_trial(data, rows)
    trials = rows["trial"].nunique()
    traces, said = [], []
    for estimator, words, colour in _estimators(rows):
        own = rows[rows["estimator"] == estimator]
        by_step = own.groupby("step")[column]
        mean = by_step.mean()
        said.append(f"{words} {mean.iloc[0]:.3g} to {mean.iloc[-1]:.3g}")
        if trials > _MOST_TRIALS:
            drawn = [("smallest", by_step.min(), False), ("largest", by_step.max(), False), ("mean", mean, True)]
        else:
            series = {trial: group.groupby("step")[column].last() for trial, group in own.groupby("trial")}
            drawn = [(f"trial {trial}", values, trial == shown) for trial, values in series.items()]
        drawn.sort(key=lambda entry: entry[2])  # the thick one on top
        for place, (what, values, thick) in enumerate(drawn, start=1):
            steps, numbers = [int(step) for step in values.index], [float(f"{value:.6g}") for value in values]
            marked = thick and len(steps) <= MOST_MARKED
            labels = [f"{words}, {what}"]
            if marked:
                labels = [f"{labels[0]}\nstep {s}: {v:.3g}" for s, v in zip(steps, numbers, strict=True)]
            traces.append(
                Points(
                    name=words if place == len(drawn) else "", x=steps, y=numbers, labels=labels, colour=colour,
                    symbol="o" if marked else "", size=5, line_width=2.4 if thick else 1.1, opacity=1 if thick else 0.6,
                    dashed=estimator == "sgd",
                )
            )  # fmt: skip
    note = f"Trial {shown}." if trials == 1 else f"The thick lines are trial {shown}'s."
    if trials > _MOST_TRIALS:
        note = f"Mean of {trials} trials (thick), smallest and largest."
    title = column.replace("_", " ")
    return Figure(
        name=name,
        alt=f"{title[0].upper()}{title[1:]} of the gradient from the first measurement to the last, mean of "
        f"{plural(trials, 'trial')}: {', '.join(said)}.",
        traces=traces,
        x=Axis(title="step"),
        y=Axis(title=title, logarithmic=True) if logarithmic else _to_one(title, rows[column]),
        height=380,
        notes=[note],
    )


def _to_one(title: str, values: pd.Series[float]) -> Axis:
    """Return an axis from 0 to 1, or to the largest value above that."""
    return Axis(title=title, range=(0, 1.04 * max(1.0, float(values.max()))))


def _both_ends(name: str) -> str:
    """Shorten a layer's name from the middle: its ends tell where it is and what; the label has it whole.

    >>> _both_ends("features.3.convolution.with.a.long.name.weight")
    'features…long.name.weight'
    """
    return name if len(name) <= _MOST_LETTERS else f"{name[:8]}…{name[9 - _MOST_LETTERS :]}"


def _estimators(rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return the estimators, their names in the legend and their colours, SGD first."""
    names = [str(name) for name in rows["estimator"].unique() if name != "sgd"]
    found = [(name, name, _COLOURS[place % len(_COLOURS)]) for place, name in enumerate(names)]
    return [("sgd", "SGD", "@text"), *found] if (rows["estimator"] == "sgd").any() else found
