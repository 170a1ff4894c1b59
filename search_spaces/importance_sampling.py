"""Importance sampling: by which score, the share that is drawn evenly, how often probabilities follow, from when on."""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Space, SpaceContext, Suggests, interval, nearest_interval
from trainables.gradients.fields import IMPORTANCE_SCORES

#: Share of the probability that is spread evenly.
UNIFORM = (0.05, 1.0)
#: Steps from one update of the probabilities to the next, on a logarithmic scale.
UPDATES = (1, 100)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the score, the even share and the interval of updates, and the first iteration."""
    return {
        "importance_by": trial.suggest_categorical("importance_by", IMPORTANCE_SCORES),
        "importance_uniform": trial.suggest_float("importance_uniform", *UNIFORM, log=True),
        "importance_update_every": trial.suggest_int("importance_update_every", *interval(UPDATES, context), log=True),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return sampling by the loss, half of it even, from the beginning."""
    return {
        "importance_by": "loss",
        "importance_uniform": 0.5,
        "importance_update_every": nearest_interval(10, UPDATES, context),
        "gradient_start_itr": 0,
    }


SPACE = Space(
    name="importance_sampling",
    method="importance_sampling",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "importance_by": "what samples are drawn by",
        "importance_uniform": "share of the probability that is spread evenly",
        "importance_update_every": "steps from one update of the probabilities to the next",
        "gradient_start_itr": central_difference.MEANINGS["gradient_start_itr"],
    },
)
