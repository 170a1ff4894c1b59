"""Joint replay of Gradient-Skip and a gradient method that is switched on at one step. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.config import TrialConfig
from trainables.gradients import replay as gradients
from trainables.gradskip import replay as gradskip
from trainables.gradskip.replay import JointReplay


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key: configurations of one workload with equal keys have equal facts."""
    return ("gradskip+gradients", *gradskip.blueprint_key(config))


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> JointReplay:
    """Create the replay of a configuration."""
    return JointReplay(
        gradskip.start_replay(config, facts["gradskip"]), gradients.start_replay(config, {}), "gradients"
    )
