"""Replay of Gradient-Skip with settings by network over recorded training. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainables.config import TrialConfig
from trainables.gradskip import replay as gradskip
from trainables.gradskip.layer_plan import Blueprint, StopEvent
from trainables.gradskip.networks.network_settings import read_networks
from trainables.interventions import Intervention, MissingSignal, Recorded, action_text

#: Key of the actions of these trials.
NETWORKS = "networks"


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key; configurations of one workload with equal keys have equal facts."""
    named = sorted(read_networks(config.network_settings or ()))
    own = ((name, *gradskip.layers_key(config.settings_of_network(name))) for name in named)
    return (NETWORKS, *gradskip.blueprint_key(config), *own)


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> NetworksReplay:
    """Return the replay of a configuration; ``facts`` is what `AttachedNetworks.model_metadata` gave."""
    return NetworksReplay(config, facts)


class NetworksReplay:
    """A replay for each network, all at the same iteration; what several of them do in one step is one intervention."""

    kind = "any"

    def __init__(self, config: TrialConfig, facts: Mapping[str, Any]) -> None:
        self._numbers = {name: tuple(numbers) for name, numbers in facts["numbers"].items()}
        self._parts = {
            name: gradskip.GradskipReplay(
                config, Blueprint.from_dict(blueprint), settings=config.settings_of_network(name),
                numbers=self._numbers[name],
            )
            for name, blueprint in facts["networks"].items()
        }  # fmt: skip
        self.first_stage_only = any(part.first_stage_only for part in self._parts.values())

    @property
    def iteration(self) -> int:
        return next(iter(self._parts.values())).iteration

    def advance(self, recorded: Recorded, until: int) -> Intervention | None:
        before = self.state_dict()
        end, missing, acts = self._first_act(recorded, until)
        for name, part in self._parts.items():
            if part.iteration > end:  # further than the first act, or than a signal that is missing
                part.load_state_dict(before[name])
                part.advance(recorded, end)
        if missing is not None:
            raise missing
        if not acts:
            return None
        return Intervention(iteration=end - 1, action=action_text({NETWORKS: acts}))

    def _first_act(self, recorded: Recorded, until: int) -> tuple[int, MissingSignal | None, dict[str, Any]]:
        """Return the iteration after the first intervention, or at which a signal is missing, and the acts by network.

        The replays end there or later, at ``until`` at most.
        """
        end, acts = until, dict[str, Any]()
        missing: MissingSignal | None = None
        for name, part in self._parts.items():
            try:
                found = part.advance(recorded, end)
            except MissingSignal as error:
                if part.iteration < end:
                    end, missing, acts = part.iteration, error, {}
                continue
            if found is None:
                continue
            if found.iteration + 1 < end or missing is not None:
                acts = {}
            end, missing = found.iteration + 1, None
            act = json.loads(found.action)
            acts[name] = {**act, "stop": [self._numbers[name][number] for number in act["stop"]]}
        return end, missing, acts

    def is_quiet(self) -> bool:
        return all(part.is_quiet() for part in self._parts.values())

    def columns(self) -> dict[str, Any]:
        return columns(all_events({name: part.events for name, part in self._parts.items()}, self._numbers))

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def all_events(events: Mapping[str, Sequence[StopEvent]], numbers: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return the stops of all networks by iteration, each with its network, and with numbers of the whole model.

    Args:
        events: of each network, numbered within it.
        numbers: of each network's parameters in the model.
    """
    found = [
        {**asdict(event), "layer": numbers[name][event.layer], "network": name}
        for name, stops in events.items()
        for event in stops
    ]
    return sorted(found, key=lambda event: int(event["iteration"]))


def columns(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result columns of the stops that `all_events` returned."""
    through = max((int(event["layer"]) for event in events), default=-1)
    return {"stopped_through": through, "stop_events": json.dumps(list(events))}
