"""What the trials say: pandas in, pandas out. Loads neither torch nor ray.

import analysis
trials = analysis.load("results/my-study")
analysis.rank(trials, allowed_drop=0.005)
"""

from analysis.baseline import relative_to_baseline
from analysis.loading import load
from analysis.ranking import best, pareto_front, rank

__all__ = ["load", "rank", "best", "pareto_front", "relative_to_baseline"]
