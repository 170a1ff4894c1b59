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
    from analysis.metrics.confirmation import Interval, confirm_table, paired_interval
    from analysis.metrics.gradient_history import gradient_clusters, gradient_statistics
    from analysis.metrics.ranking import (
        accuracy_when_shorter,
        beats_shorter,
        best,
        control_line,
        rank,
        relative_to_baseline,
    )
    from analysis.presentation.export import export_trial
    from analysis.presentation.stage_frame import stage_frame, tree_text
    from analysis.trace_replay.replay_frame import replay
    from analysis.trace_replay.traces import load_trace

__all__ = [
    "load", "history", "relative_to_baseline", "rank", "best", "control_line", "accuracy_when_shorter",
    "beats_shorter", "confirm_table", "paired_interval", "Interval", "export_trial", "replay", "load_trace",
    "search_cost", "SearchCost", "gradient_statistics", "gradient_clusters", "stage_frame", "tree_text",
]  # fmt: skip

# Not by `trainables.lazy_names`: a folder of the user's may hide trainables until tune_cac is imported.
_NAMES = {
    "analysis.io.studies": ("load", "history"),
    "analysis.metrics.accounting": ("search_cost", "SearchCost"),
    "analysis.metrics.ranking": (
        "accuracy_when_shorter", "beats_shorter", "best", "control_line", "rank", "relative_to_baseline",
    ),
    "analysis.metrics.confirmation": ("confirm_table", "paired_interval", "Interval"),
    "analysis.metrics.gradient_history": ("gradient_statistics", "gradient_clusters"),
    "analysis.presentation.export": ("export_trial",),
    "analysis.presentation.stage_frame": ("stage_frame", "tree_text"),
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
