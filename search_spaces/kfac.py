"""K-FAC: damping, KL clip, decay of the factors, how often they are measured and decomposed, from when on."""

from __future__ import annotations

from typing import Any

from search_spaces import central_difference
from search_spaces.space import Space, SpaceContext, Suggests, interval, nearest_interval
from trainables.gradients.fields import DEFAULTS

#: Damping and KL clip, on logarithmic scales.
DAMPINGS, KL_CLIPS = (1e-4, 1e-1), (1e-4, 1e-1)
#: Decays of the factors' moving averages.
DECAYS = (0.8, 0.99)
#: Steps from one measurement of the factors, and from one decomposition, to the next, on logarithmic scales.
FACTORS, INVERSES = (1, 100), (10, 1000)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for damping, clip, decay and intervals, and the first iteration."""
    return {
        "kfac_damping": trial.suggest_float("kfac_damping", *DAMPINGS, log=True),
        "kfac_kl_clip": trial.suggest_float("kfac_kl_clip", *KL_CLIPS, log=True),
        "kfac_decay": trial.suggest_float("kfac_decay", *DECAYS),
        "kfac_factor_every": trial.suggest_int("kfac_factor_every", *interval(FACTORS, context), log=True),
        "kfac_inverse_every": trial.suggest_int("kfac_inverse_every", *interval(INVERSES, context), log=True),
        "gradient_start_itr": central_difference.suggest_start(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the defaults of the published code, from the beginning."""
    published = DEFAULTS["kfac"]
    return {
        **{name: published[name] for name in ("kfac_damping", "kfac_kl_clip", "kfac_decay")},
        "kfac_factor_every": nearest_interval(published["kfac_factor_every"], FACTORS, context),
        "kfac_inverse_every": nearest_interval(published["kfac_inverse_every"], INVERSES, context),
        "gradient_start_itr": 0,
    }


SPACE = Space(
    name="kfac",
    method="kfac",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "kfac_damping": "added to the eigenvalues of the curvature",
        "kfac_kl_clip": "bound on the KL divergence of a step",
        "kfac_decay": "decay of the factors' moving averages",
        "kfac_factor_every": "steps from one measurement of the factors to the next",
        "kfac_inverse_every": "steps from one eigendecomposition to the next",
        "gradient_start_itr": central_difference.MEANINGS["gradient_start_itr"],
    },
)
