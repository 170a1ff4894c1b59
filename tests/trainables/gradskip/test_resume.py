"""A run that is cut at any step and goes on from its saved state is the run that was not cut, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from conv_models import conv_model
from loops import DecayInside, equal, train, weights
from saved_states import round_trip
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from trainables.gradskip import SGD, AdamW, Settings, wrap

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


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("rule", "kind", "whole_units"), CASES)
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
