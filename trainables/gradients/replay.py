"""Replay of an estimator over recorded training: it is switched on at one step. Does not import torch.

From that step on, everything depends on the estimator's fields, so they are all part of the one intervention; before
it, a run is that of backpropagation, which all estimators share. What an estimator costs is known from trials alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.config import TrialConfig
from trainables.gradients.fields import estimator_in, settings_of
from trainables.gradskip import replay as gradskip
from trainables.gradskip.replay import JointReplay
from trainables.interventions import Intervention, PlannedActs, action_text
from trainables.metrics import METHOD_DEFAULTS


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key: configurations of one workload with equal keys have equal facts, of which estimators need none."""
    return ("gradskip+gradients", *gradskip.blueprint_key(config)) if config.skips_gradients else ("gradients",)


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> PlannedActs | JointReplay:
    """Create the replay of a configuration, beside that of Gradient-Skip where it is joined with it."""
    acts = PlannedActs((switched_on(config),), METHOD_DEFAULTS)
    if not config.skips_gradients:
        return acts
    return JointReplay(gradskip.start_replay(config, facts["gradskip"]), acts, "gradients")


def switched_on(config: TrialConfig) -> Intervention:
    """Return the intervention that switches a configuration's estimator on."""
    settings = settings_of(config)
    start = int(settings.pop("gradient_start_itr"))
    if settings.get("gradient_layers") is not None:
        settings["gradient_layers"] = list(settings["gradient_layers"])
    return Intervention(iteration=start, action=action_text({str(estimator_in(config.method)): settings}))
