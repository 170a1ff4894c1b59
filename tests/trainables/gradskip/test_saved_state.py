"""A state loaded under other settings: iterations and stops go on, the rule begins anew with what has not stopped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import EAGER, SHRINKING, equal, train, weights
from torch import nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings

RULES: dict[str, Settings] = {
    "off": Settings(start_thr=-1),
    "variance": Settings(**EAGER),
    "manual": Settings(stop_layer_num=(2, 7), stop_layer_itr=(2, 16)),
    "linear": Settings(rule="linear", rule_end_itr=30, rule_depth=1.0),
    "freezeout": Settings(rule="freezeout", rule_end_itr=30),
    "gradient_norm": Settings(rule="gradient_norm", rule_interval=2, rule_percentile=80),
    "plasticity": Settings(rule="plasticity", rule_interval=1, rule_window=2, rule_tolerance=0.9),
}
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


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("off", "manual")])
def test_a_rule_goes_on_behind_what_has_stopped(rule: str) -> None:
    """No event of a layer that has stopped, and the last convolution still comes to its stop."""
    model_state, state = trained(STOPPED, 5)
    model, optimizer = build(RULES[rule])
    model.load_state_dict(model_state)
    name = "auto" if rule == "variance" else rule
    with pytest.warns(UserWarning, match=rf"of rule manual \(layers 4 at 3\) and the settings ask for rule {name} "):
        optimizer.load_state_dict(state)
    assert (optimizer.gradskip.iteration, optimizer.gradskip.stopped) == (5, (0, 1, 2, 3, 4))
    before = weights(model)
    train(model, optimizer, 30, start=5)
    assert [event.layer for event in optimizer.gradskip.events] == [4, 7]
    assert optimizer.gradskip.events[1].iteration >= 5
    assert equal(before[:5], weights(model)[:5])


@pytest.mark.slow
@pytest.mark.parametrize("target", RULES)
@pytest.mark.parametrize("source", RULES)
@pytest.mark.parametrize("cut", [1, 9])
def test_from_every_rule_to_every_other(source: str, target: str, cut: int) -> None:
    model_state, state = trained(RULES[source], cut)
    model, optimizer = build(RULES[target])
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    skip = optimizer.gradskip
    stopped, events = skip.stopped, [event.layer for event in skip.events]
    train(model, optimizer, 31 - cut, start=cut)
    assert set(stopped) <= set(skip.stopped)
    new = [event.layer for event in skip.events][len(events) :]
    assert not set(new) & set(stopped)
    assert new == sorted(new)
    assert skip.iteration == 31
    if target in ("variance", "linear"):
        assert skip.stopped_through == 7


def test_other_manual_lists_leave_out_what_has_stopped() -> None:
    model_state, state = trained(Settings(stop_layer_num=(1, 4), stop_layer_itr=(1, 3)), 5)
    model, optimizer = build(Settings(stop_layer_num=(0, 2, 7), stop_layer_itr=(1, 4, 8)))
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    train(model, optimizer, 6, start=5)
    assert [(event.iteration, event.layer) for event in optimizer.gradskip.events] == [(1, 1), (3, 4), (8, 7)]


class TestOtherLayers:
    def model(self) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),
            nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5),
        )  # fmt: skip

    def build(self, settings: Settings) -> tuple[Any, SGD]:
        model = self.model()
        return model, SGD(model.parameters(), **SHRINKING, settings=settings, model=model)

    def test_another_watch_is_applied(self) -> None:
        model, optimizer = self.build(Settings(**EAGER))
        train(model, optimizer, 4)
        assert [event.layer for event in optimizer.gradskip.events] == [0]
        other, resumed = self.build(Settings(**EAGER, watch=("linear",)))
        other.load_state_dict(model.state_dict())
        with pytest.warns(UserWarning, match=r"auto \(CAC_WATCH=conv\) and the settings ask for .*CAC_WATCH=linear\)"):
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert [unit.number for unit in resumed.gradskip.plan.units] == [4, 6, 8]
        train(other, resumed, 12, start=4)
        assert [event.layer for event in resumed.gradskip.events] == [0, 4, 6, 8]

    @pytest.mark.parametrize("first", [False, True])
    def test_whole_units_switched_on_or_off_keep_what_has_stopped(self, first: bool) -> None:
        model, optimizer = self.build(Settings(**EAGER, whole_units=first))
        train(model, optimizer, 4)
        stopped = optimizer.gradskip.stopped
        assert stopped == ((0, 1) if first else (0,))
        other, resumed = self.build(Settings(**EAGER, whole_units=not first))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert resumed.gradskip.stopped == stopped
        before = weights(other)
        train(other, resumed, 12, start=4)
        assert resumed.gradskip.events[0].layer == 0
        assert set(stopped) < set(resumed.gradskip.stopped)
        assert all(torch.equal(before[n], weights(other)[n]) for n in stopped)

    def test_another_watch_while_a_layer_brakes(self) -> None:
        """Braking goes on to its stop, and the new rule has nothing to say of that layer."""
        model, optimizer = self.build(Settings(**EAGER, braking_distance=6))
        train(model, optimizer, 4)
        assert optimizer.gradskip.machine.braking_through == 0
        other, resumed = self.build(Settings(**EAGER, braking_distance=6, watch=("Conv2d", "Linear")))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(other, resumed, 30, start=4)
        assert [event.layer for event in resumed.gradskip.events][:2] == [0, 2]

    def test_targets_of_one_whole_unit_are_one(self) -> None:
        model, optimizer = self.build(Settings(**EAGER, stop_layer_num=(0, 2, 3), whole_units=True))
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
