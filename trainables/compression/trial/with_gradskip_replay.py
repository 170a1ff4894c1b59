"""Joint replay of Gradient-Skip and a compression schedule over recorded training. Does not import torch.

Gradient-Skip decides by the weights after the previous step; compression acts later in the step. So both use the same
state, and if both act in one step, it is one intervention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainables.compression.trial import replay as compression
from trainables.config import TrialConfig
from trainables.gradskip import replay as gradskip
from trainables.interventions import Intervention, Recorded, action_text


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key: configurations of one workload with equal keys have equal facts."""
    return ("gradskip+compression", *gradskip.blueprint_key(config))


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> JointReplay:
    """Create the replay of a configuration."""
    return JointReplay(config, facts)


class JointReplay:
    """Both replays, always at the same iteration."""

    def __init__(self, config: TrialConfig, facts: Mapping[str, Any]) -> None:
        self.gradskip = gradskip.start_replay(config, facts["gradskip"])
        self.compression = compression.start_replay(config, facts["compression"])
        self.kind = self.gradskip.kind
        self.first_stage_only = self.gradskip.first_stage_only

    @property
    def iteration(self) -> int:
        return self.gradskip.iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        while self.iteration < until:
            pruning = self.compression.next_action()
            # Before the step in which compression acts, only Gradient-Skip is replayed; in that step both are.
            end = until if pruning is None else min(until, max(pruning, self.iteration + 1))
            if pruning == self.iteration:
                before = self.gradskip.state_dict()
                try:
                    stop = self.gradskip.advance(recorded, pruning + 1)
                    act = self.compression.advance(recorded, pruning + 1)
                except BaseException:
                    self.gradskip.load_state_dict(before)
                    raise
                assert act is not None
                return act if stop is None else _both(act, stop)
            try:
                stop = self.gradskip.advance(recorded, end)
            finally:
                self.compression.iteration = self.gradskip.iteration
            if stop is not None:
                return stop
        return None

    def is_quiet(self) -> bool:
        return self.gradskip.is_quiet() and self.compression.is_quiet()

    def columns(self) -> dict[str, Any]:
        return self.gradskip.columns()

    def state_dict(self) -> dict[str, Any]:
        return {**self.gradskip.state_dict(), "compression": self.compression.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradskip.load_state_dict(state)
        self.compression.load_state_dict(state["compression"])


def _both(act: Intervention, stop: Intervention) -> Intervention:
    return Intervention(
        iteration=act.iteration, action=action_text({**json.loads(act.action), **json.loads(stop.action)})
    )
