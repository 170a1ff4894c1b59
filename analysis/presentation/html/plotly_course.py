"""Convergence, cost and learning curves for the page: the plots of `figures.course` as plain dicts for Plotly."""

from __future__ import annotations

from typing import Any

from analysis.presentation.figures.course import accuracy_range, convergence, cost, learning_curves
from analysis.presentation.figures.outcomes import Points
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.html.plotly_parts import PlotlyFigure, axis, marks, safe


def learning_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of learning curves; None if there are none."""
    curves = learning_curves(data)
    if not curves:
        return None
    looks = {
        "trial": ("@trial", 1, "solid", 0.6),
        "baseline": ("@text", 2.2, "dash", 1),
        "chosen": ("@chosen", 2.6, "solid", 1),
    }
    traces, others = [], False
    for curve in curves:
        colour, width, dash, opacity = looks[curve.kind]
        first_other = curve.kind == "trial" and not others
        others |= first_other
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "best of the others" if curve.kind == "trial" else curve.name,
                "legendgroup": curve.kind,
                "showlegend": curve.kind != "trial" or first_other,
                "x": curve.epoch,
                "y": curve.accuracy,
                "opacity": opacity,
                "line": {"color": colour, "width": width, "dash": dash},
                "hoverinfo": "text",
                "hovertext": [
                    safe(f"{curve.name}\nepoch {e:.0f}: {a:.2f} %")
                    for e, a in zip(curve.epoch, curve.accuracy, strict=True)
                ],
            }
        )
    alt = "Validation accuracy after each epoch: " + ", ".join(c.name for c in curves if c.kind != "trial")
    layout = {"xaxis": axis("epoch"), "yaxis": axis("validation accuracy (%)", range=list(accuracy_range(curves)))}
    return PlotlyFigure(name="learning", alt=alt + ".", traces=traces, layout=layout, height=400,
                        notes=["The first epochs may lie below the picture; a double click shows all."])  # fmt: skip


def convergence_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of savings and the best so far by trial; None if no trial completed."""
    found = convergence(data)
    if found is None:
        return None
    traces = []
    for name, wanted, symbol, colour in (
        ("over the allowed accuracy loss", False, "circle-open", "@trial"),
        ("within the allowed accuracy loss", True, "circle", "@front"),
    ):
        those = [i for i, within in enumerate(found.within) if within == wanted]
        group = Points(
            x=[float(found.trial[i]) for i in those],
            y=[found.saved[i] for i in those],
            labels=[found.labels[i] for i in those],
            counts=[1] * len(those),
        )
        if those:
            trace = marks(name, group, symbol, colour, size=6)
            trace["marker"]["line"] = {"width": 1, "color": colour}
            traces.append(trace)
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "best so far", "x": found.trial, "y": found.best,
            "line": {"color": "@chosen", "width": 2.4, "shape": "hv"}, "hoverinfo": "text",
            "hovertext": [f"trial {t}: best so far {b:.1f} %" for t, b in zip(found.trial, found.best, strict=True)],
        }
    )  # fmt: skip
    alt = (
        f"Best {found.what} within the allowed accuracy loss by trial: {found.best[-1]:.1f} % after "
        f"{len(found.trial)} trials."
    )
    layout = {"xaxis": _trial_axis(found.trial), "yaxis": axis(f"{found.what} (%)")}
    return PlotlyFigure(name="convergence", alt=alt, traces=traces, layout=layout, height=400)


def hypervolume_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of the hypervolume by trial; None if no trial or no baseline completed."""
    found = convergence(data)
    if found is None or not found.hypervolume:
        return None
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": "hypervolume", "x": found.trial, "y": found.hypervolume,
            "showlegend": False, "line": {"color": "@front", "width": 2.4, "shape": "hv"}, "hoverinfo": "text",
            "hovertext": [f"trial {t}: {v:.1f}" for t, v in zip(found.trial, found.hypervolume, strict=True)],
        }
    ]  # fmt: skip
    layout = {"xaxis": _trial_axis(found.trial), "yaxis": axis("hypervolume (% × points)", rangemode="tozero")}  # noqa: RUF001
    alt = f"Hypervolume dominated by the trials so far: {found.hypervolume[-1]:.1f} after {len(found.trial)} trials."
    notes = ["Area under the Pareto front, above nothing saved and the baseline's accuracy less 5 points."]
    return PlotlyFigure(name="hypervolume", alt=alt, traces=traces, layout=layout, height=360, notes=notes)


def cost_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of the search's cumulative compute by trial; None if it is unknown."""
    found = cost(data)
    if found is None:
        return None
    traces = []
    for name, values, colour, dash in (
        ("each trial alone", found.alone, "@trial", "dash"),
        ("executed by the search", found.executed, "@front", "solid"),
    ):
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": name, "x": found.trial, "y": values,
                "line": {"color": colour, "width": 2.4, "dash": dash}, "hoverinfo": "text",
                "hovertext": [f"up to trial {t}: {v:.1f} ({name})" for t, v in zip(found.trial, values, strict=True)],
            }
        )  # fmt: skip
    layout = {"xaxis": _trial_axis(found.trial), "yaxis": axis("compute (full trainings)", rangemode="tozero")}
    alt = (
        f"Compute of the search: {found.executed[-1]:.1f} full trainings executed, {found.alone[-1]:.1f} trained alone."
    )
    return PlotlyFigure(name="cost", alt=alt, traces=traces, layout=layout, height=360)


def _trial_axis(trials: list[int]) -> dict[str, Any]:
    """Return the axis of trial numbers, with ticks at integers only."""
    return axis("trial", dtick=1) if trials[-1] - trials[0] < 10 else axis("trial")
