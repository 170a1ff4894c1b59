"""A configuration followed over recorded signals, asked step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainables.config import TrialConfig
from trainables.gradskip.replay import start_replay
from trainables.interventions import Intervention, MethodReplay, PlannedActs
from trainables.training.run import TrainingRun

STEPS = 60


class Falling:
    """Signals that rise and fall, another way for each layer; counts looks."""

    def __init__(self) -> None:
        self.looks = 0

    def at(self, name: str, iteration: int) -> float:
        self.looks += 1
        return 2 + math.sin(iteration / 4 + len(name))


SETTINGS: list[dict[str, Any]] = [
    {"CAC_VAR_START_THR": 0.9, "CAC_VAR_MT_THR": 0.9, "CAC_VAR_SLOPE_THR": 0.95, "CAC_VAR_SAMPLES": 3,
     "CAC_VAR_START_ITR": 5, "CAC_BRAKING_DISTANCE": 4},
    {"CAC_STOP_LAYER_NUM": (2, 5), "CAC_STOP_LAYER_ITR": (7, 20)},
    {"CAC_RULE": "linear", "CAC_RULE_END_ITR": STEPS},
    {"CAC_RULE": "gradient_norm", "CAC_RULE_START_ITR": 4, "CAC_RULE_INTERVAL": 5},
    {"CAC_RULE": "freezeout", "CAC_RULE_END_ITR": STEPS},
    {"method": "none"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_a_quiet_step_has_no_look_and_no_action(settings: dict[str, Any]) -> None:
    config = TrialConfig(epochs=6, **settings)
    with TrainingRun(config) as run:
        replay: MethodReplay = (
            PlannedActs((), {}) if config.method == "none" else start_replay(config, run.method.model_metadata())
        )
    acted: list[Intervention] = []
    quiet = looked = 0
    for iteration in range(STEPS):
        assert replay.iteration == iteration
        signals, said_quiet = Falling(), replay.is_quiet()
        intervention = replay.advance(signals, iteration + 1)
        if said_quiet:
            quiet += 1
            assert intervention is None
            assert signals.looks == 0
        looked += signals.looks > 0
        acted += [intervention] if intervention is not None else []
    assert acted or config.method == "none"
    assert quiet > 0 or config.CAC_RULE == "freezeout"
