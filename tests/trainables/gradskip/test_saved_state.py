"""A state loaded under other settings: thresholds may differ, the rule and its layers may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import EAGER, SHRINKING, train
from torch import nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings

#: Through layer 4, the second convolution.
STOPPED = Settings(stop_layer_num=(4,), stop_layer_itr=(3,))


pytestmark = pytest.mark.usefixtures("quiet")


def build(settings: Settings) -> tuple[nn.Module, SGD]:
    model = conv_model()
    return model, SGD(model.parameters(), **SHRINKING, settings=settings, model=model)


def trained(settings: Settings, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of the model and of the optimizer."""
    model, optimizer = build(settings)
    train(model, optimizer, steps)
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Settings(**EAGER), r"of mode=manual and the settings ask for auto: train on with those, or take the entry"),
        (Settings(stop_layer_num=(2, 7), stop_layer_itr=(2, 16)), r"stop_layer_num=\[4\] .* ask for \[2, 7\]"),
        (Settings(stop_layer_num=(4,), stop_layer_itr=(3,), whole_units=True), "whole_units=False .* ask for True"),
        (Settings(stop_layer_num=(4,), stop_layer_itr=(3,), watch=("linear",)), r"\['conv'\] .* for \['linear'\]"),
    ],
)
def test_a_state_of_other_settings_is_refused_and_goes_without_ours(other: Settings, said: str) -> None:
    _, state = trained(STOPPED, 5)
    _, optimizer = build(other)
    with pytest.raises(UserError, match=said):
        optimizer.load_state_dict(state)
    del state["gradskip"]
    optimizer.load_state_dict(state)
    assert (optimizer.gradskip.iteration, optimizer.gradskip.stopped) == (0, ())


def test_thresholds_may_be_others() -> None:
    model_state, state = trained(Settings(**EAGER), 4)
    model, optimizer = build(Settings(**{**EAGER, "slope_thr": 0.001, "mt_thr": 0.001}))
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    stopped = optimizer.gradskip.stopped
    train(model, optimizer, 20, start=4)
    assert optimizer.gradskip.stopped == stopped != ()


def test_targets_of_one_whole_unit_are_one() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )
    settings = Settings(**EAGER, stop_layer_num=(0, 2, 3), whole_units=True)
    optimizer = SGD(model.parameters(), **SHRINKING, settings=settings, model=model)
    assert [(unit.number, unit.end) for unit in optimizer.gradskip.plan.units] == [(0, 1), (2, 3)]
    train(model, optimizer, 12)
    assert [event.layer for event in optimizer.gradskip.events] == [0, 2]


def test_a_state_of_another_version_is_refused_before_anything_is_taken() -> None:
    _, state = trained(STOPPED, 5)
    del state["gradskip"]["stops"]
    _, optimizer = build(STOPPED)
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(UserError, match="of another version of Gradient-Skip: train on with that version, or load"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == SHRINKING["lr"]
    assert optimizer.gradskip.stopped == ()


@pytest.mark.parametrize("distance", [0, 2, 9])
def test_braking_under_way_ends_under_another_distance(distance: int) -> None:
    manual: dict[str, Any] = {"stop_layer_num": (4,), "stop_layer_itr": (3,)}
    model_state, state = trained(Settings(**manual, braking_distance=6), 5)
    model, optimizer = build(Settings(**manual, braking_distance=distance))
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    train(model, optimizer, 9, start=5)
    assert optimizer.gradskip.stopped == (0, 1, 2, 3, 4)
    assert len(optimizer.gradskip.events) == 1
