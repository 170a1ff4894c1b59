"""What the trials say: pandas in, pandas out. Loads neither torch nor ray.

import analysis
trials = analysis.load("results/my-study")
analysis.rank(trials, allowed_drop=0.005)
"""

from analysis.accounting import SearchCost, search_cost
from analysis.baseline import relative_to_baseline
from analysis.loading import load
from analysis.ranking import best, pareto_front, rank
from analysis.replaying import replay
from analysis.traces import load_trace
from analysis.tree import stage_frame, tree_text
from analysis.tree_picture import tree_svg

__all__ = [
    "load",
    "rank",
    "best",
    "pareto_front",
    "relative_to_baseline",
    "replay",
    "load_trace",
    "search_cost",
    "SearchCost",
    "stage_frame",
    "tree_text",
    "tree_svg",
]
