"""What the trials say: pandas in, pandas out. Loads neither torch nor ray.

import analysis
trials = analysis.load("results/my-study")
analysis.rank(trials, allowed_drop=0.005)
"""

from analysis.io.epoch_rows import history
from analysis.io.studies import load
from analysis.metrics.accounting import SearchCost, search_cost
from analysis.metrics.baseline import relative_to_baseline
from analysis.metrics.confidence import Interval, confirm_table, paired_interval
from analysis.metrics.controls import accuracy_when_shorter, beats_shorter, control_line
from analysis.metrics.interaction import interactions
from analysis.metrics.parameter_importance import importance
from analysis.metrics.ranking import best, front_hypervolume, knee_trial, pareto_front, rank
from analysis.presentation.export import export_table, export_trial
from analysis.presentation.stage_frame import stage_frame, tree_text
from analysis.presentation.study_comparison import Comparison, compare
from analysis.presentation.tree_picture import tree_svg
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
    "interactions",
    "compare",
    "Comparison",
    "export_trial",
    "export_table",
    "replay",
    "load_trace",
    "search_cost",
    "SearchCost",
    "stage_frame",
    "tree_text",
    "tree_svg",
]
