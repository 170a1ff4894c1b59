"""SVRG: how often the snapshot is taken, the coefficient of the control variate, from when on.

A snapshot costs a pass over the data, and each step a second gradient as long as the coefficient is above 0.
"""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Space, SpaceContext, Suggests, interval, nearest_interval

#: Steps from one snapshot to the next, on a logarithmic scale; at most the run's length.
SNAPSHOTS = (5, 2000)
#: Coefficient of the control variate.
ALPHAS = (0.1, 1.0)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the snapshots' interval, the coefficient and whether it decays, and the first iteration."""
    return {
        "svrg_snapshot_every": trial.suggest_int("svrg_snapshot_every", *interval(SNAPSHOTS, context), log=True),
        "svrg_alpha": trial.suggest_float("svrg_alpha", *ALPHAS),
        "svrg_alpha_decays": trial.suggest_categorical("svrg_alpha_decays", (False, True)),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the whole control variate from the beginning, with a snapshot every ten steps or so."""
    return {
        "svrg_snapshot_every": nearest_interval(10, SNAPSHOTS, context),
        "svrg_alpha": 1.0,
        "svrg_alpha_decays": False,
        "gradient_start_itr": 0,
    }


SPACE = Space(
    name="svrg",
    method="svrg",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "svrg_snapshot_every": "steps from one snapshot, a pass over the data, to the next",
        "svrg_alpha": "coefficient of the control variate; 0 is SGD",
        "svrg_alpha_decays": "whether the coefficient falls linearly to 0 over the run",
        "gradient_start_itr": central_difference.MEANINGS["gradient_start_itr"],
    },
)
