"""Gradients through binary activations: which estimator, how many samples, how they are weighted, from when on.

Each sample is a forward and a backward pass; before the first iteration the plain straight-through estimator trains.
Needs a model with binary activations: workload binary_mlp, digits with activations=binary, or one of the user's.
"""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Branch, Space, SpaceContext, Suggests

#: Most samples of a step.
MOST_SAMPLES = 8
#: Length of the step that measures an effect, and deviation of a perturbation, on logarithmic scales.
TRIAL_STEPS, SIGMAS = (1e-3, 1e-1), (1e-3, 1e-1)
#: Estimators that are searched.
CHOICES = ("stochastic_rounding", "backward_noise", "proposal", "nes")


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for an estimator, its samples and their weighting, and the first iteration."""
    estimator = trial.suggest_categorical("ste_estimator", CHOICES)
    branch = Branch(trial, estimator)
    return {
        "ste_estimator": estimator,
        "gradient_start_itr": central_difference.suggest_start(trial, context),
        **_of_estimator(branch, estimator),
    }


def _of_estimator(trial: Suggests, estimator: str) -> dict[str, Any]:
    if estimator == "nes":
        return {
            "ste_samples": trial.suggest_int("ste_samples", 1, MOST_SAMPLES, log=True),
            "ste_sigma": trial.suggest_float("ste_sigma", *SIGMAS, log=True),
        }
    least = 2 if estimator == "proposal" else 1
    weightings = ("effect", "best") if estimator == "proposal" else ("uniform", "effect", "best")
    weighting = trial.suggest_categorical("ste_weighting", weightings)
    found = {
        "ste_samples": trial.suggest_int("ste_samples", least, MOST_SAMPLES, log=True),
        "ste_weighting": weighting,
    }
    if weighting != "uniform":
        found["ste_trial_step"] = trial.suggest_float("ste_trial_step", *TRIAL_STEPS, log=True)
    return found


def start(context: SpaceContext) -> dict[str, Any]:
    """Return one sample of stochastic rounding a step, from the beginning."""
    return {
        "ste_estimator": "stochastic_rounding",
        "gradient_start_itr": 0,
        "stochastic_rounding.ste_weighting": "uniform",
        "stochastic_rounding.ste_samples": 1,
    }


SPACE = Space(
    name="straight_through",
    method="straight_through",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "ste_estimator": "how gradients pass binary activations",
        "ste_samples": "gradients that are sampled in a step; of nes, pairs of forward passes",
        "ste_weighting": "how samples become one direction",
        "ste_trial_step": "length of the step that measures a sample's effect",
        "ste_sigma": "of nes: standard deviation of a weight's perturbation",
        "gradient_start_itr": "first iteration with the estimator; the plain one before",
    },
)
