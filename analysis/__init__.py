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
    "load",
    "history",
    "relative_to_baseline",
    "rank",
    "best",
    "pareto_front",
    "front_hypervolume",
    "knee_trial",
    "control_line",
    "accuracy_when_shorter",
    "beats_shorter",
    "confirm_table",
    "paired_interval",
    "Interval",
    "importance",
    "compare",
    "Comparison",
    "equal_compute",
    "export_trial",
    "export_table",
    "replay",
    "load_trace",
    "search_cost",
    "SearchCost",
    "gradient_statistics",
    "recipe_effects",
    "gradient_clusters",
    "stage_frame",
    "tree_text",
]

# Not by `trainables.lazy_names`: a folder of the user's may hide trainables until tune_cac is imported.
_HOMES = {
    "history": "analysis.io.studies",
    "load": "analysis.io.studies",
    "SearchCost": "analysis.metrics.accounting",
    "search_cost": "analysis.metrics.accounting",
    "relative_to_baseline": "analysis.metrics.ranking",
    "Interval": "analysis.metrics.confirmation",
    "confirm_table": "analysis.metrics.confirmation",
    "paired_interval": "analysis.metrics.confirmation",
    "accuracy_when_shorter": "analysis.metrics.ranking",
    "beats_shorter": "analysis.metrics.ranking",
    "control_line": "analysis.metrics.ranking",
    "equal_compute": "analysis.metrics.compute_budgets",
    "gradient_clusters": "analysis.metrics.gradient_history",
    "recipe_effects": "analysis.metrics.recipe_effects",
    "gradient_statistics": "analysis.metrics.gradient_history",
    "importance": "analysis.metrics.parameter_importance",
    "best": "analysis.metrics.ranking",
    "front_hypervolume": "analysis.metrics.ranking",
    "knee_trial": "analysis.metrics.ranking",
    "pareto_front": "analysis.metrics.ranking",
    "rank": "analysis.metrics.ranking",
    "export_table": "analysis.presentation.export",
    "export_trial": "analysis.presentation.export",
    "stage_frame": "analysis.presentation.stage_frame",
    "tree_text": "analysis.presentation.stage_frame",
    "Comparison": "analysis.presentation.study_comparison",
    "compare": "analysis.presentation.study_comparison",
    "replay": "analysis.trace_replay.replay_frame",
    "load_trace": "analysis.trace_replay.traces",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
