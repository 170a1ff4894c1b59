"""A state saved at any step: the run goes on bit for bit; under other thresholds, but not other rules or layers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import EAGER, SHRINKING, DecayInside, equal, train, weights
from saved_states import round_trip
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from trainables.errors import UserError
from trainables.gradskip import SGD, AdamW, Settings, wrap

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


STEPS = 16
MANUAL = Settings(stop_layer_num=(3, 6), stop_layer_itr=(3, 8), braking_distance=4)
AUTO = Settings(start_itr=1, samples=2, start_thr=1.0, slope_thr=1.0, mt_thr=1.0, braking_distance=3)
#: Settings whose cuts fall before, into and after stops and brakings.
RULES = {
    "manual": MANUAL,
    "manual, published": replace(MANUAL, reference=True),
    "auto": AUTO,
    "auto, published": replace(AUTO, reference=True),
    "linear": Settings(rule="linear", rule_start_itr=2, rule_end_itr=12, rule_depth=1.0, braking_distance=2),
    "freezeout": Settings(rule="freezeout", rule_start_itr=5, rule_end_itr=20),
    "gradient_norm": Settings(rule="gradient_norm", rule_start_itr=2, rule_interval=3, rule_percentile=60),
    "grades": Settings(rule="grades", rule_start_itr=2, rule_interval=3, rule_tau=0.03),
    "plasticity": Settings(rule="plasticity", rule_start_itr=1, rule_interval=1, rule_window=2, rule_tolerance=0.9),
}
OPTIMIZERS = {
    "SGD": lambda p, more: SGD(p, lr=0.02, momentum=0.9, weight_decay=1.0, **more),
    "AdamW": lambda p, more: AdamW(p, lr=1e-2, weight_decay=0.1, **more),
    "RMSprop": lambda p, more: wrap(torch.optim.RMSprop(p, lr=1e-3, momentum=0.5), **more),
    "not in torch": lambda p, more: wrap(DecayInside(p, lr=0.05), **more),
}
CASES = [
    *((rule, "SGD", False) for rule in RULES),
    *((rule, "SGD", True) for rule in ("auto", "freezeout", "plasticity")),
    *(("manual", optimizer, False) for optimizer in ("AdamW", "RMSprop", "not in torch")),
]
#: The published rule, and both ways to an optimizer.
STANDING_FOR_ALL = (("auto", "SGD", False), ("manual", "AdamW", False), ("manual", "not in torch", False))


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("rule", "kind", "whole_units"),
    [pytest.param(*case, marks=[pytest.mark.thorough] * (case not in STANDING_FOR_ALL)) for case in CASES],
)
def test_resume_at_every_iteration_is_bit_exact(rule: str, kind: str, whole_units: bool) -> None:
    """Under a decaying learning rate; also into a model that is stopped further than the state is."""

    def build() -> tuple[nn.Module, Any, ExponentialLR]:
        model = conv_model()
        more = {"settings": replace(RULES[rule], whole_units=whole_units), "model": model}
        optimizer: Any = OPTIMIZERS[kind](model.parameters(), more)
        return model, optimizer, ExponentialLR(optimizer, 0.97)

    whole, whole_optimizer, whole_schedule = build()
    saved = []

    def save(_: int = 0) -> None:
        states = [whole.state_dict(), whole_optimizer.state_dict(), whole_schedule.state_dict()]
        saved.append(round_trip(states))

    save()
    train(whole, whole_optimizer, STEPS, each=lambda step: (whole_schedule.step(), save(step)))
    events = whole_optimizer.gradskip.events
    assert events
    for cut, (model_state, state, schedule_state) in enumerate(saved[:STEPS]):
        for into_stopped in (False, True)[: 1 + (cut % 5 == 3)]:
            resumed, optimizer, schedule = build()
            if into_stopped:
                train(resumed, optimizer, STEPS)
            resumed.load_state_dict(model_state)
            optimizer.load_state_dict(copy.deepcopy(state))
            schedule.load_state_dict(schedule_state)
            train(resumed, optimizer, STEPS - cut, start=cut, each=lambda _, s=schedule: s.step())  # type: ignore[misc]
            assert equal(weights(resumed), weights(whole)), (cut, into_stopped)
            assert optimizer.gradskip.events == events
