"""Central differences for the last parameters of the model: how many of them, the distance, and from when on.

An estimate costs two forward passes a weight, but behind a layer only what follows it: of the last layers it is cheap.
"""

from __future__ import annotations

from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests

#: Most parameters, counted from the model's end, that are estimated.
MOST_LAYERS = 4
#: Half the distance of two evaluations, on a logarithmic scale: below, float32 rounds the difference away.
EPSILONS = (1e-3, 1e-1)
#: Latest iteration at which the estimator is switched on, as a share of the run, and the number of steps of its grid.
LATEST, GRID = 0.9, 9

MEANINGS = {
    "last_layers": "how many parameters, counted from the model's end, are estimated",
    "gradient_epsilon": "half the distance of two evaluations of the loss",
    "gradient_start_itr": "first iteration with the estimator; backpropagation before",
}


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the number of last parameters, epsilon, and the first iteration."""
    return {
        "gradient_layers": suggest_layers(trial, context),
        "gradient_epsilon": trial.suggest_float("gradient_epsilon", *EPSILONS, log=True),
        "gradient_start_itr": suggest_start(trial, context),
    }


def suggest_layers(trial: Suggests, context: SpaceContext) -> tuple[str, ...]:
    """Ask for a number and return the names of that many last parameters of the model."""
    most = min(MOST_LAYERS, max(1, len(context.layer_names)))
    return context.layer_names[-trial.suggest_int("last_layers", 1, most) :] or ("*",)


def suggest_start(trial: Suggests, context: SpaceContext) -> int:
    """Ask for the first iteration with the estimator."""
    step = max(1, int(LATEST * context.total_steps) // GRID)
    most = int(LATEST * context.total_steps) // step * step
    return trial.suggest_int("gradient_start_itr", 0, most, step=step)


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the last parameter alone, from the beginning, at the epsilon of the notes' experiment."""
    return {"last_layers": 1, "gradient_epsilon": 0.01, "gradient_start_itr": 0}


SPACE = Space(
    name="central_difference",
    method="central_difference",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings=MEANINGS,
)
