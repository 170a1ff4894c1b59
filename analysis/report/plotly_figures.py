"""The plots for the page: the numbers of `figures` as plain dicts for Plotly, drawn in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.answer import percent, plural
from analysis.report.course_figures import accuracy_range, convergence, cost, learning_curves
from analysis.report.data import ReportData
from analysis.report.figures import Bars, Points, confirmation, importance, interactions, pareto
from analysis.report.plotly_parts import MOST_LETTERS, PlotlyFigure, axis, line_of, marks, note, safe, short
from analysis.report.stop_figures import timeline, variance

#: Layers that a legend names; of more the colour says which, and what is said of a line.
_MOST_NAMED = 8


def plotly_figures(data: ReportData) -> dict[str, PlotlyFigure]:
    """Every plot that there is something to draw for, by name."""
    makers = (
        _pareto, _confirmation, _timeline, _variance, _learning, _importance, _interactions, _convergence,
        _hypervolume, _cost,
    )  # fmt: skip
    found = (maker(data) for maker in makers)
    return {figure.name: figure for figure in found if figure is not None}


def _pareto(data: ReportData) -> PlotlyFigure | None:
    found = pareto(data)
    if found is None:
        return None
    sizes = [min(16.0, 6 + 2 * n**0.5) for n in found.trials.counts]
    traces = [marks("trials", found.trials, "circle", "@trial", opacity=0.9)]
    traces[0]["marker"]["size"] = sizes
    traces.append(
        marks("Pareto front", found.front, "circle", "@front", size=8)
        | {"mode": "lines+markers", "line": {"color": "@front", "width": 2, "shape": "vh"}}
    )
    if len(found.shorter):
        traces.append(
            marks("simply training shorter", found.shorter, "triangle-down", "@control", size=9)
            | {"mode": "lines+markers", "line": {"color": "@control", "width": 2, "dash": "dash"}}
        )
    for name, group, symbol, colour, size in (
        ("random stops", found.random_stops, "x", "@control", 9),
        ("published defaults", found.published, "diamond", "@published", 11),
        ("baseline", found.baseline, "square", "@text", 10),
        ("chosen", found.chosen, "star", "@chosen", 17),
    ):
        if len(group):
            traces.append(marks(name, group, symbol, colour, size=size))
    layout: dict[str, Any] = {
        "xaxis": axis("compute saved (%)"),
        "yaxis": axis("validation accuracy (%)", range=list(found.y_range)),
    }
    notes = ["Up and to the right is better. Point at a mark to see its trials; of equal outcomes one mark is drawn."]
    if found.least_accuracy is not None:
        layout["shapes"] = [line_of(found.least_accuracy, axis="y")]
        layout["annotations"] = [note("allowed drop", x=0, y=found.least_accuracy)]
    if found.below:
        said = "1 trial lies" if found.below == 1 else f"{found.below} trials lie"
        notes.append(f"{said} below the picture; a double click shows all.")
    best = max(zip(found.front.x, found.front.y, strict=True), default=None)
    reach = "" if best is None else f", reaching {best[0]:.1f} % compute saved at {best[1]:.2f} % accuracy"
    alt = (
        f"Compute saved against validation accuracy of {plural(sum(found.trials.counts), 'searched trial')}. "
        f"The Pareto front has {plural(len(found.front), 'outcome')}{reach}."
    )
    return PlotlyFigure(name="pareto", alt=alt, traces=traces, layout=layout, height=480, notes=notes)


def _confirmation(data: ReportData) -> PlotlyFigure | None:
    found = confirmation(data)
    if found is None:
        return None
    places = list(range(len(found.candidates)))
    traces = []
    for name, wanted, symbol, colour in (
        ("confirmed", True, "circle", "@chosen"),
        ("not confirmed", False, "circle-open", "@control"),
    ):
        those = [i for i in places if found.confirmed[i] == wanted]
        if those:
            spread = {
                "type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 7,
                "array": [found.high[i] - found.drop[i] for i in those],
                "arrayminus": [found.drop[i] - found.low[i] for i in those],
            }  # fmt: skip
            group = Points(
                x=[found.drop[i] for i in those],
                y=[float(i) for i in those],
                labels=[found.labels[i] for i in those],
                counts=[1] * len(those),
            )
            trace = marks(name, group, symbol, colour, size=11, error_x=spread)
            trace["marker"]["line"] = {"width": 2, "color": colour}
            traces.append(trace)
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "allowed drop", "x": [found.allowed, found.allowed],
            "y": [-0.6, len(places) - 0.4], "line": {"color": "@limit", "width": 1.4, "dash": "dash"},
            "hoverinfo": "skip",
        }
    )  # fmt: skip
    layout = {
        "xaxis": axis("drop in test accuracy (points)", zeroline=True),
        "yaxis": axis("", tickvals=places, ticktext=[safe(c) for c in found.candidates], range=[len(places) - 0.4, -0.6],
                      showgrid=False, zeroline=False),
    }  # fmt: skip
    alt = f"Drop in accuracy with its interval: {sum(found.confirmed)} of {len(places)} candidates are confirmed."
    notes = ["A candidate is confirmed when the upper end of its interval is within the allowed drop."]
    height = 150 + 36 * len(places)
    return PlotlyFigure(name="confirmation", alt=alt, traces=traces, layout=layout, height=height, notes=notes)


def _timeline(data: ReportData) -> PlotlyFigure | None:
    found = timeline(data)
    if found is None:
        return None
    stretches = [(place, stretch) for place, row in enumerate(found.rows) for stretch in row.stretches]
    training = [(p, s) for p, s in stretches if s.layer < 0]
    stopped = [(p, s) for p, s in stretches if s.layer >= 0]
    bar = {"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False}
    line = {"width": 1, "color": "@ground"}

    def bars(those: Sequence[tuple[int, Any]], marker: dict[str, Any]) -> dict[str, Any]:
        return bar | {
            "y": [p for p, _ in those],
            "x": [s.end - s.begin for _, s in those],
            "base": [s.begin for _, s in those],
            "hovertext": [safe(s.label) for _, s in those],
            "marker": marker,
        }

    most = max(1, found.last_layer)
    # The scale stands at a trace without points: bars with numbers for colours make Plotly complain.
    scale = {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "hoverinfo": "skip",
        "showlegend": False,
        "marker": {
            "color": [0], "colorscale": "@depth", "cmin": 0, "cmax": most, "showscale": True,
            "colorbar": {"title": {"text": "stopped through layer number", "side": "top", "font": {"size": 12}},
                         "orientation": "h", "thickness": 10, "len": 0.6, "x": 0, "xanchor": "left", "y": 1.0,
                         "yanchor": "bottom", "outlinewidth": 0, "tickformat": "d", "nticks": 6},
        },
    }  # fmt: skip
    traces = [
        bars(training, {"color": "@rest", "line": line}),
        bars(stopped, {"color": [f"@depth:{s.layer / most:.3f}" for _, s in stopped], "line": line}),
        scale,
    ]
    places = list(range(len(found.rows)))
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": axis("iteration", range=[0, found.total_steps]),
        "yaxis": axis("", tickvals=places, ticktext=[safe(row.name) for row in found.rows], autorange="reversed",
                       showgrid=False, zeroline=False),
        "margin": {"t": 70},
    }  # fmt: skip
    notes = [
        "A row an outcome, best first: trial, how many trials are alike, compute saved. Grey: every layer trains; "
        "the colour tells how far layers have stopped."
    ]
    if found.hidden:
        notes.append(f"{plural(found.hidden, 'more outcome')} not shown.")
    if found.without:
        notes.append(f"{plural(found.without, 'ranked trial')} stopped nothing.")
    alt = f"When layers stopped in the {plural(len(found.rows), 'best outcome')} of {found.total_steps} iterations."
    height = 170 + 22 * max(3, len(found.rows))
    return PlotlyFigure(name="timeline", alt=alt, traces=traces, layout=layout, height=height, notes=notes)


def _variance(data: ReportData) -> PlotlyFigure | None:
    found = variance(data)
    if found is None:
        return None
    traces: list[dict[str, Any]] = []
    named = len(found.layers) <= _MOST_NAMED
    last_line = {line.layer: line for line in found.lines}  # the examined one, where there is one
    for line in found.lines:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if line.examined and len(line.iteration) <= 60 else "lines",
                "name": safe(short(line.layer)),
                "legendgroup": f"layer {found.layers.index(line.layer)}",
                "showlegend": named and line is last_line[line.layer],
                "x": line.iteration,
                "y": line.ratio,
                "opacity": 1 if line.examined else 0.55,
                "line": {"color": f"@depth:{line.place:.3f}", "width": 2.4 if line.examined else 1.1,
                         "dash": "solid" if line.examined else "dot"},
                "marker": {"color": f"@depth:{line.place:.3f}", "size": 4},
                "hoverinfo": "text",
                "hovertext": [
                    safe(f"{line.layer}{'' if line.examined else ' (not examined yet)'}\niteration {i}, ratio {r:.4f}")
                    for i, r in zip(line.iteration, line.ratio, strict=True)
                ],
            }
        )  # fmt: skip
    if len(found.stops):
        traces.append(marks("stopped", found.stops, "x", "@text", size=10))
    values = dict(found.thresholds)
    layout = {
        "xaxis": axis("iteration"),
        "yaxis": axis("weight variance / its peak", range=list(found.y_range)),
        "shapes": [line_of(value, axis="y") for value in values.values()],
        "annotations": _threshold_notes(found.thresholds, found.y_range),
    }
    alt = f"Weight variance over its running peak of {plural(len(found.layers), 'layer')}; {len(found.stops)} stopped."
    notes = [
        "A layer stops when its line falls below a threshold. Solid: examined by the rule, against the peak since the "
        "layer became its target; dotted: not examined yet, against the peak since the run's start."
    ]
    return PlotlyFigure(name="variance", alt=alt, traces=traces, layout=layout, height=460, notes=notes)


def _threshold_notes(thresholds: Sequence[tuple[str, float]], y_range: tuple[float, float]) -> list[dict[str, Any]]:
    """The names of thresholds at their lines; those too near to each other share one."""
    near = 0.05 * (y_range[1] - y_range[0])
    groups: list[list[tuple[str, float]]] = []
    for name, value in sorted(thresholds, key=lambda threshold: threshold[1]):
        if groups and value - groups[-1][-1][1] < near:
            groups[-1].append((name, value))
        else:
            groups.append([(name, value)])
    return [
        note(", ".join(f"{n.removeprefix('CAC_VAR_')} {v:.4g}" for n, v in group), x=1, y=group[-1][1], right=True)
        for group in groups
    ]


def _learning(data: ReportData) -> PlotlyFigure | None:
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


def _bar_figure(name: str, found: list[Bars], what: str, share: str) -> PlotlyFigure | None:
    """Bars of all objectives over one list of names, in the order of the first objective."""
    if not found:
        return None
    names = list(dict.fromkeys(n for bars in found for n in bars.names))
    colours = ("@front", "@control", "@published")
    traces = []
    for place, bars in enumerate(found):
        values = dict(zip(bars.names, bars.values, strict=True))
        shown = [n for n in names if n in values]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": safe(bars.objective.replace("_", " ")),
                "y": [names.index(n) for n in shown],
                "x": [values[n] for n in shown],
                "marker": {"color": colours[place % len(colours)]},
                "hoverinfo": "text",
                "hovertext": [safe(f"{n}\n{share} for {bars.objective}: {values[n]:.3f}") for n in shown],
            }
        )
    label = [safe(short(n, 2 * MOST_LETTERS)).replace(" × ", " ×<br>") for n in names]  # noqa: RUF001
    rows = max(2, len(names)) * (1 if name == "importance" else 1.35)
    layout = {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": axis(share, rangemode="tozero"),
        "yaxis": axis("", tickvals=list(range(len(names))), ticktext=label, autorange="reversed", showgrid=False),
    }
    first = found[0]
    alt = f"{what}: for {first.objective} most of all {first.names[0]} ({percent(first.values[0])})."
    return PlotlyFigure(name=name, alt=alt, traces=traces, layout=layout, height=round(130 + 30 * rows))


def _importance(data: ReportData) -> PlotlyFigure | None:
    return _bar_figure("importance", importance(data), "Importance of parameters", "importance (share)")


def _interactions(data: ReportData) -> PlotlyFigure | None:
    return _bar_figure("interactions", interactions(data), "Interaction of parameters", "interaction (strength)")


def _convergence(data: ReportData) -> PlotlyFigure | None:
    found = convergence(data)
    if found is None:
        return None
    traces = []
    for name, wanted, symbol, colour in (
        ("over the allowed drop", False, "circle-open", "@trial"),
        ("within the allowed drop", True, "circle", "@front"),
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
        f"Best compute saved within the allowed drop by trial: {found.best[-1]:.1f} % after {len(found.trial)} trials."
    )
    layout = {"xaxis": axis("trial"), "yaxis": axis("compute saved (%)")}
    return PlotlyFigure(name="convergence", alt=alt, traces=traces, layout=layout, height=400)


def _hypervolume(data: ReportData) -> PlotlyFigure | None:
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
    layout = {"xaxis": axis("trial"), "yaxis": axis("hypervolume (% × points)", rangemode="tozero")}  # noqa: RUF001
    alt = f"Hypervolume dominated by the trials so far: {found.hypervolume[-1]:.1f} after {len(found.trial)} trials."
    notes = ["Area under the Pareto front, above nothing saved and the baseline's accuracy less 5 points."]
    return PlotlyFigure(name="hypervolume", alt=alt, traces=traces, layout=layout, height=360, notes=notes)


def _cost(data: ReportData) -> PlotlyFigure | None:
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
    layout = {"xaxis": axis("trial"), "yaxis": axis("compute (trainings)", rangemode="tozero")}
    alt = f"Compute of the search: {found.executed[-1]:.1f} trainings executed, {found.alone[-1]:.1f} trained alone."
    return PlotlyFigure(name="cost", alt=alt, traces=traces, layout=layout, height=360)
