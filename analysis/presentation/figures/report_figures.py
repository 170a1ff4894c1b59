"""All plots of the report."""

from __future__ import annotations

from analysis.presentation.figures.course import convergence, cost, hypervolume, learning_curves
from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.gradient_noise import gradient_noise, gradient_variance, layer_noise
from analysis.presentation.figures.outcomes import confirmation, importance, interactions, pareto
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.stops import timeline, variance

_MAKERS = (
    pareto, confirmation, timeline, variance, learning_curves, gradient_noise, gradient_variance, layer_noise,
    importance, interactions, convergence, hypervolume, cost,
)  # fmt: skip


def report_figures(data: ReportData) -> dict[str, Figure]:
    """Return all plots that have data, by name."""
    found = (make(data) for make in _MAKERS)
    return {figure.name: figure for figure in found if figure is not None}
