"""Gradient clustering: how many clusters, found by passes over the data or from trained batches, how often."""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Branch, Space, SpaceContext, Suggests, branch_name
from trainables.gradients.fields import CLUSTER_MODES, usual_cluster_interval

#: Clusters, on a logarithmic scale.
CLUSTERS = (2, 64)
#: Steps from one update to the next, by mode, on logarithmic scales; a full one costs passes over the data.
EVERY = {"full": (20, 5000), "online": (1, 50)}
#: Passes of a full update; decay of the centres in online mode.
ITERATIONS, DECAYS = (1, 5), (0.5, 0.999)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the clusters and the mode, then for the mode's settings, and the first iteration."""
    mode = trial.suggest_categorical("cluster_mode", CLUSTER_MODES)
    branch = Branch(trial, mode)
    found = {
        "cluster_mode": mode,
        "cluster_count": trial.suggest_int("cluster_count", *CLUSTERS, log=True),
        "cluster_every": branch.suggest_int("cluster_every", *_intervals(mode, context), log=True),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }
    if mode == "full":
        found["cluster_iterations"] = branch.suggest_int("cluster_iterations", *ITERATIONS)
    else:
        found["cluster_decay"] = branch.suggest_float("cluster_decay", *DECAYS)
    return found


def _intervals(mode: str, context: SpaceContext) -> tuple[int, int]:
    low, high = EVERY[mode]
    return min(low, context.total_steps), min(high, context.total_steps)


def start(context: SpaceContext) -> dict[str, Any]:
    """Return ten clusters from the beginning on, found by three passes as often as the method's default."""
    low, high = _intervals("full", context)
    every = usual_cluster_interval(context.total_steps // context.epochs, iterations=3)
    return {
        "cluster_mode": "full",
        "cluster_count": 10,
        branch_name("full", "cluster_every"): max(low, min(every, high)),
        branch_name("full", "cluster_iterations"): 3,
        "gradient_start_itr": 0,
    }


SPACE = Space(
    name="gradient_clustering",
    method="gradient_clustering",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "cluster_mode": "clusters from passes over all samples, or from the batches that are trained",
        "cluster_count": "clusters of similar gradients",
        "cluster_every": "steps from one update of the clusters to the next",
        "cluster_iterations": "passes over the data of a full update",
        "cluster_decay": "decay of the centres in online mode",
        "gradient_start_itr": central_difference.MEANINGS["gradient_start_itr"],
    },
)
