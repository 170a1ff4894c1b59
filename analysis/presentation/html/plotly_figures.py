"""The page's plots: the numbers of `figures` as plain dicts for Plotly, drawn in the browser."""

from __future__ import annotations

from typing import Any

from analysis.formatting import percent, plural
from analysis.presentation.figures.outcomes import Bars, Points, confirmation, importance, interactions, pareto
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.html.plotly_course import (
    convergence_figure,
    cost_figure,
    hypervolume_figure,
    learning_figure,
)
from analysis.presentation.html.plotly_parts import MOST_LETTERS, PlotlyFigure, axis, line_of, marks, note, safe, short
from analysis.presentation.html.plotly_stops import timeline_figure, variance_figure


def plotly_figures(data: ReportData) -> dict[str, PlotlyFigure]:
    """Return all plots that have data, by name."""
    makers = (
        pareto_figure, confirmation_figure, timeline_figure, variance_figure, learning_figure, importance_figure,
        interactions_figure, convergence_figure, hypervolume_figure, cost_figure,
    )  # fmt: skip
    found = (maker(data) for maker in makers)
    return {figure.name: figure for figure in found if figure is not None}


def pareto_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of saving against accuracy with the Pareto front; None if no trial completed."""
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
            marks("cut dense runs", found.shorter, "triangle-down", "@control", size=9)
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
        "xaxis": axis(f"{found.saved} (%)"),
        "yaxis": axis("validation accuracy (%)", range=list(found.y_range)),
    }
    notes = ["Up and to the right is better. Point at a mark to see its trials; of equal outcomes one mark is drawn."]
    if found.least_accuracy is not None:
        layout["shapes"] = [line_of(found.least_accuracy, axis="y")]
        layout["annotations"] = [note("allowed accuracy loss", x=0, y=found.least_accuracy)]
    if found.below:
        said = "1 trial lies" if found.below == 1 else f"{found.below} trials lie"
        notes.append(f"{said} below the picture; a double click shows all.")
    best = max(zip(found.front.x, found.front.y, strict=True), default=None)
    reach = "" if best is None else f", reaching {best[0]:.1f} % {found.saved} at {best[1]:.2f} % accuracy"
    alt = (
        f"{found.saved.capitalize()} against validation accuracy of "
        f"{plural(sum(found.trials.counts), 'searched trial')}. "
        f"The Pareto front has {plural(len(found.front), 'outcome')}{reach}."
    )
    return PlotlyFigure(name="pareto", alt=alt, traces=traces, layout=layout, height=480, notes=notes)


def confirmation_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of accuracy losses on fresh seeds with intervals; None if no candidate was retrained."""
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
            "type": "scatter", "mode": "lines", "name": "allowed accuracy loss", "x": [found.allowed, found.allowed],
            "y": [-0.6, len(places) - 0.4], "line": {"color": "@limit", "width": 1.4, "dash": "dash"},
            "hoverinfo": "skip",
        }
    )  # fmt: skip
    layout = {
        "xaxis": axis("loss of test accuracy (points)", zeroline=True),
        "yaxis": axis("", tickvals=places, ticktext=[safe(c) for c in found.candidates],
                      range=[len(places) - 0.4, -0.6], showgrid=False, zeroline=False),
    }  # fmt: skip
    alt = f"Accuracy loss with its interval: {sum(found.confirmed)} of {len(places)} candidates are confirmed."
    notes = ["A candidate is confirmed when the upper end of its interval is within the allowed accuracy loss."]
    height = 150 + 36 * len(places)
    return PlotlyFigure(name="confirmation", alt=alt, traces=traces, layout=layout, height=height, notes=notes)


def _bar_figure(name: str, found: list[Bars], what: str, share: str) -> PlotlyFigure | None:
    """Return grouped bars of all objectives over one list of names, in the order of the first objective."""
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
                "name": safe(bars.title),
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


def importance_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the bar plot of parameter importance; None if it is unknown."""
    return _bar_figure("importance", importance(data), "Importance of parameters", "importance (share)")


def interactions_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the bar plot of parameter interactions; None if they are unknown."""
    return _bar_figure("interactions", interactions(data), "Interaction of parameters", "interaction (strength)")
