"""Analysis of trials: pandas in, pandas out. Loads neither torch nor ray.

    import analysis
    trials = analysis.load("results/my-study")
    analysis.rank(trials, allowed_drop=0.005)

Importing this package does not load pandas either; the module of a function is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.io.studies import history, load
    from analysis.metrics.accounting import SearchCost, search_cost
    from analysis.metrics.compute_budgets import equal_compute
    from analysis.metrics.confirmation import Interval, confirm_table, paired_interval
    from analysis.metrics.gradient_history import gradient_clusters, gradient_statistics
    from analysis.metrics.parameter_importance import importance
    from analysis.metrics.ranking import (
        accuracy_when_shorter,
        beats_shorter,
        best,
        control_line,
        front_hypervolume,
        knee_trial,
        pareto_front,
        rank,
        relative_to_baseline,
    )
    from analysis.metrics.recipe_effects import recipe_effects
    from analysis.presentation.export import export_table, export_trial
    from analysis.presentation.stage_frame import stage_frame, tree_text
    from analysis.presentation.study_comparison import Comparison, compare
    from analysis.trace_replay.replay_frame import replay
    from analysis.trace_replay.traces import load_trace

__all__ = [
    "load", "history", "relative_to_baseline", "rank", "best", "pareto_front", "front_hypervolume", "knee_trial",
    "control_line", "accuracy_when_shorter", "beats_shorter", "confirm_table", "paired_interval", "Interval",
    "importance", "compare", "Comparison", "equal_compute", "export_trial", "export_table", "replay", "load_trace",
    "search_cost", "SearchCost", "gradient_statistics", "recipe_effects", "gradient_clusters", "stage_frame",
    "tree_text",
]  # fmt: skip

# Not by `trainables.lazy_names`: a folder of the user's may hide trainables until tune_cac is imported.
_NAMES = {
    "analysis.io.studies": ("load", "history"),
    "analysis.metrics.accounting": ("search_cost", "SearchCost"),
    "analysis.metrics.ranking": (
        "accuracy_when_shorter", "beats_shorter", "best", "control_line", "front_hypervolume", "knee_trial",
        "pareto_front", "rank", "relative_to_baseline",
    ),
    "analysis.metrics.confirmation": ("confirm_table", "paired_interval", "Interval"),
    "analysis.metrics.compute_budgets": ("equal_compute",),
    "analysis.metrics.gradient_history": ("gradient_statistics", "gradient_clusters"),
    "analysis.metrics.recipe_effects": ("recipe_effects",),
    "analysis.metrics.parameter_importance": ("importance",),
    "analysis.presentation.export": ("export_trial", "export_table"),
    "analysis.presentation.stage_frame": ("stage_frame", "tree_text"),
    "analysis.presentation.study_comparison": ("compare", "Comparison"),
    "analysis.trace_replay.replay_frame": ("replay",),
    "analysis.trace_replay.traces": ("load_trace",),
}  # fmt: skip
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
