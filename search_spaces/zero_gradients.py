"""Zero gradients: from which loss gradient on a sample takes part in the backward pass, unbiased or not, from when on.

The saving is in the backward pass, so at most about two thirds of a run. It can be joined with Gradient-Skip.
"""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Space, SpaceContext, Suggests

#: Norm of a sample's output gradient below which it is left out, on a logarithmic scale; of a cross entropy it is at
#: most 1.41.
THRESHOLDS = (1e-3, 1.0)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for the threshold, whether the gradient stays unbiased, and the first iteration."""
    return {
        "zero_threshold": trial.suggest_float("zero_threshold", *THRESHOLDS, log=True),
        "zero_unbiased": trial.suggest_categorical("zero_unbiased", (False, True)),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return a small threshold from the beginning."""
    return {"zero_threshold": 0.03, "zero_unbiased": False, "gradient_start_itr": 0}


SPACE = Space(
    name="zero_gradients",
    method="zero_gradients",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "zero_threshold": "norm of a sample's output gradient below which it is left out of the backward pass",
        "zero_unbiased": "whether some of those samples are kept with a larger weight",
        "gradient_start_itr": "first iteration that leaves samples out",
    },
)
