"""Discrete gradient steps for the last parameters of the model: how many of them, step, stride, order, and when.

A step searches every element of these parameters: where few strides lower the loss it costs many forward passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces import central_difference
from search_spaces.space import SpaceContext, Suggests
from trainables.gradients.fields import OBJECTIVES

#: Length of a step, on a logarithmic scale, and strides in it.
EPSILONS, STRIDES = (1e-3, 1e-1), (3, 30)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the number of last parameters, epsilon, the strides in it, the order, and the first iteration."""
    epsilon = trial.suggest_float("gradient_epsilon", *EPSILONS, log=True)
    return {
        "gradient_layers": central_difference.suggest_layers(trial, context),
        "gradient_epsilon": epsilon,
        "discrete_stride": epsilon / trial.suggest_int("strides", *STRIDES, log=True),
        "discrete_objective": trial.suggest_categorical("discrete_objective", OBJECTIVES),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the last parameter alone, from the beginning, at an epsilon of the notes' experiment."""
    return {**central_difference.start(context), "strides": 10, "discrete_objective": OBJECTIVES[0]}


SPACE = replace(
    central_difference.SPACE,
    name="discrete_gradient",
    method="discrete_gradient",
    suggest=suggest,
    start=start,
    meanings={
        **central_difference.SPACE.meanings,
        "gradient_epsilon": "length of a step",
        "strides": "strides in epsilon; a stride is the smallest change of a weight",
        "discrete_objective": "by what changes are ordered before they are taken",
    },
)
