"""What the trials say: pandas in, pandas out. Loads neither torch nor ray.

import analysis
trials = analysis.load("results/my-study")
analysis.rank(trials, allowed_drop=0.005)
"""

from analysis.accounting import SearchCost, search_cost
from analysis.baseline import relative_to_baseline
from analysis.comparing import Comparison, compare
from analysis.confidence import Interval, confirm_table, paired_interval
from analysis.controls import accuracy_when_shorter, beats_shorter, control_line
from analysis.epoch_rows import history
from analysis.exporting import export_table, export_trial
from analysis.interaction import interactions
from analysis.loading import load
from analysis.parameter_importance import importance
from analysis.ranking import best, front_hypervolume, knee_trial, pareto_front, rank
from analysis.replaying import replay
from analysis.traces import load_trace
from analysis.tree import stage_frame, tree_text
from analysis.tree_picture import tree_svg

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
