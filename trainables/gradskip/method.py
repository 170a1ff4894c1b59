"""Gradient-Skip as a method of a trial."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import Any

from torch.optim import Optimizer

from trainables.attachment import Attached, RunFacts
from trainables.config import TrialConfig
from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.replay import columns


class AttachedGradientSkip(Attached):
    """Gradient-Skip attached to one training run."""

    def __init__(self, gradskip: GradientSkip) -> None:
        self.gradskip = gradskip

    def stop_key(self) -> Hashable:
        return self.gradskip.stopped_through

    def watched_layers(self) -> list[tuple[int, ...]]:
        return [unit.watched for unit in self.gradskip.plan.units]

    def columns(self) -> dict[str, Any]:
        return columns(self.gradskip.stopped_through, self.gradskip.events)

    def model_metadata(self) -> dict[str, Any]:
        return self.gradskip.blueprint.to_dict()

    def training_state(self) -> dict[str, Any]:
        state = self.gradskip.state_dict()
        return {"signal": state["signal"], "stops": state["stops"]}

    def decision_state(self) -> dict[str, Any]:
        return {"machine": self.gradskip.machine.state_dict(), "events": self.events()}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        fresh = self.gradskip.state_dict()
        self.gradskip.load_state_dict(
            {**fresh, **{k: training_state[k] for k in training_state if k in fresh}, **decision_state}
        )

    def events(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.gradskip.events]


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> AttachedGradientSkip:
    """Attach Gradient-Skip with the config's settings; the environment is not read."""
    with warnings.catch_warnings():
        # A search may try settings that stop nothing; its table shows that they did.
        warnings.filterwarnings("ignore", message="Gradient-Skip (will|may) stop nothing")
        return AttachedGradientSkip(
            GradientSkip(
                optimizer,
                config.gradskip_settings(),
                model=run.model,
                example_inputs=run.forward,
                total_steps=run.total_steps,
            )
        )
