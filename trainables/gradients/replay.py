"""Replay of an estimator over recorded training: it is switched on at one step. Does not import torch.

From that step on, everything depends on the estimator's fields, so they are all part of the one intervention; before
it, a run is that of backpropagation, which all estimators share. What an estimator costs is known from trials alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.config import TrialConfig
from trainables.gradients.fields import estimator_in, settings_of
from trainables.interventions import Intervention, PlannedActs, action_text
from trainables.metrics import METHOD_DEFAULTS


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return the same key for all configurations, because their replay needs no facts about the model."""
    return ("gradients",)


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> PlannedActs:
    """Create the replay of a configuration."""
    return PlannedActs((switched_on(config),), METHOD_DEFAULTS)


def switched_on(config: TrialConfig) -> Intervention:
    """Return the intervention that switches a configuration's estimator on."""
    settings = settings_of(config)
    start = int(settings.pop("gradient_start_itr"))
    if settings.get("gradient_layers") is not None:
        settings["gradient_layers"] = list(settings["gradient_layers"])
    return Intervention(iteration=start, action=action_text({str(estimator_in(config.method)): settings}))
