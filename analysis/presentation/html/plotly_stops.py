"""Stop timeline and weight variances for the page: the plots of `figures.stops` as plain dicts for Plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.formatting import plural
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.stops import near_thresholds, timeline, variance
from analysis.presentation.html.plotly_parts import PlotlyFigure, axis, line_of, marks, note, safe, short

#: Maximum number of layers in a legend; with more, colour and hover text identify the layers.
MOST_NAMED = 8


def timeline_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the stop timeline of the best outcomes; None if no trial stopped a layer."""
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
    # The colour scale belongs to a trace without points because Plotly complains about bars with numeric colours.
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


def variance_figure(data: ReportData) -> PlotlyFigure | None:
    """Return the plot of weight variances of the chosen trial; None if none were recorded."""
    found = variance(data)
    if found is None:
        return None
    traces: list[dict[str, Any]] = []
    named = len(found.layers) <= MOST_NAMED
    last_line = {line.layer: line for line in found.lines}  # the examined one if there is one
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
    layout = {
        "xaxis": axis("iteration"),
        "yaxis": axis("weight variance / its peak", range=list(found.y_range)),
        "shapes": [line_of(value, axis="y") for value in sorted({value for _, value in found.thresholds})],
        "annotations": _threshold_notes(found.thresholds, found.y_range),
    }
    alt = f"Weight variance over its running peak of {plural(len(found.layers), 'layer')}; {len(found.stops)} stopped."
    notes = [
        "A layer stops when its line falls below a threshold. Solid: examined by the rule, against the peak since the "
        "layer became its target; dotted: not examined yet, against the peak since the run's start."
    ]
    return PlotlyFigure(name="variance", alt=alt, traces=traces, layout=layout, height=460, notes=notes)


def _threshold_notes(thresholds: Sequence[tuple[str, float]], y_range: tuple[float, float]) -> list[dict[str, Any]]:
    return [note(text, x=1, y=value, right=True) for text, value in near_thresholds(thresholds, y_range)]
