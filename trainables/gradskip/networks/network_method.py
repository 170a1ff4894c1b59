"""Gradient-Skip with settings by network as a method of a trial."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch.optim import Optimizer

from trainables.attachment import Attached, RunFacts
from trainables.config import TrialConfig
from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.layers import numbered
from trainables.gradskip.method import AttachedGradientSkip
from trainables.gradskip.networks.network_optimizers import NetworkOptimizers
from trainables.gradskip.networks.network_replay import all_events, columns
from trainables.gradskip.networks.network_settings import check_networks


class AttachedNetworks(Attached):
    """Gradient-Skip on each network of a model, attached to one training run.

    Args:
        parts: Gradient-Skip of each network, by name.
        numbers: numbers of each network's parameters in the model, in the order of its own numbering.
    """

    def __init__(self, parts: Mapping[str, GradientSkip], numbers: Mapping[str, tuple[int, ...]]) -> None:
        self.parts = {name: AttachedGradientSkip(part) for name, part in parts.items()}
        self._numbers = dict(numbers)

    def stop_key(self) -> Hashable:
        return tuple(part.stop_key() for part in self.parts.values())

    def watched_layers(self) -> list[tuple[int, ...]]:
        return [
            tuple(self._numbers[name][number] for number in watched)
            for name, part in self.parts.items()
            for watched in part.watched_layers()
        ]

    def events(self) -> list[dict[str, Any]]:
        return all_events({name: part.gradskip.events for name, part in self.parts.items()}, self._numbers)

    def columns(self) -> dict[str, Any]:
        return columns(self.events())

    def model_metadata(self) -> dict[str, Any]:
        return {
            "networks": {name: part.model_metadata() for name, part in self.parts.items()},
            "numbers": {name: list(numbers) for name, numbers in self._numbers.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"decision_state": self.decision_state(), "training_state": self.training_state()}

    def training_state(self) -> dict[str, Any]:
        return {name: part.training_state() for name, part in self.parts.items()}

    def decision_state(self) -> dict[str, Any]:
        return {name: part.decision_state() for name, part in self.parts.items()}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            if name in decision_state:
                part.resume(decision_state[name], training_state.get(name, {}))


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> AttachedNetworks:
    """Attach Gradient-Skip to each network of the workload's model.

    Raises:
        UserError: settings of a network that the model does not have, or a model without networks.
    """
    check_networks(config.network_settings or (), run.networks, config.workload)
    numbering, _ = numbered(optimizer.param_groups, run.model)
    number_of = {id(parameter): number for number, parameter in enumerate(numbering)}
    optimizers = NetworkOptimizers(optimizer, run.model, run.networks)
    parts: dict[str, GradientSkip] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Gradient-Skip (will|may) stop nothing")
        for name, part in optimizers.parts.items():
            settings = config.settings_of_network(name)
            parts[name] = GradientSkip(
                part, settings, model=run.model, example_inputs=run.forward, total_steps=run.total_steps
            )
    numbers = {name: tuple(number_of[id(p)] for p in part.parameters) for name, part in parts.items()}
    return AttachedNetworks(parts, numbers)
