"""States of `gradskip.SGD`: resumed at any iteration, loaded from and into torch's, copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_models import short_conv_model as make_model
from loops import OFF, equal, train, weights
from torch import nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Adam, AdamW, Settings


@pytest.mark.slow
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_resume_at_every_iteration_is_bit_exact(mode: str, reference: bool) -> None:
    if mode == "manual":
        settings = Settings(
            stop_layer_num=(1, 4), stop_layer_itr=(2, 8), braking_distance=3, reference=reference
        )  # the cuts fall before, into and after both brakings
    else:
        settings = Settings(
            start_itr=1, samples=2, start_thr=1.0, slope_thr=1.0, mt_thr=1.0, braking_distance=3, reference=reference
        )
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1.0, "settings": settings}

    def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def build() -> tuple[nn.Module, SGD, torch.optim.lr_scheduler.LRScheduler]:
        model = make_model()
        optimizer = SGD(model.parameters(), **options)
        return model, optimizer, scheduled(optimizer)

    whole, whole_optimizer, whole_schedule = build()
    train(whole, whole_optimizer, 14, each=lambda _: whole_schedule.step())
    assert whole_optimizer.gradskip.stopped_through == 4
    for cut in range(1, 14):
        model, optimizer, schedule = build()
        train(model, optimizer, cut, each=lambda _, s=schedule: s.step())  # type: ignore[misc]
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
        file.seek(0)
        model_state, optimizer_state, schedule_state = torch.load(file, weights_only=True)
        resumed, resumed_optimizer, resumed_schedule = build()
        resumed.load_state_dict(model_state)
        resumed_optimizer.load_state_dict(optimizer_state)
        resumed_schedule.load_state_dict(schedule_state)
        train(resumed, resumed_optimizer, 14 - cut, start=cut, each=lambda _, s=resumed_schedule: s.step())  # type: ignore[misc]
        assert equal(weights(resumed), weights(whole)), cut
        assert resumed_optimizer.gradskip.events == whole_optimizer.gradskip.events


def test_loading_an_earlier_state_lets_layers_train_again() -> None:
    model = make_model()
    settings = Settings(stop_layer_num=(1, 4), stop_layer_itr=(2, 6))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, settings=settings)
    train(model, optimizer, 4)
    saved, saved_model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, 6, start=4)
    expected = weights(model)
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved)
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 7
    train(model, optimizer, 6, start=4)
    assert equal(weights(model), expected)


def test_a_state_of_torch_sgd_loads_and_leaves_the_rule_alone() -> None:
    model = make_model()
    theirs = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    train(model, theirs, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, settings=OFF)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.gradskip.iteration == 0


def test_our_state_loads_into_torch_sgd() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9, settings=OFF)
    train(model, optimizer, 2)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 0.3


def test_a_state_of_a_larger_model_is_refused() -> None:
    large, small = make_model(), nn.Linear(2, 2)
    optimizer = SGD(large.parameters(), lr=0.1, settings=Settings(stop_layer_num=(5,), stop_layer_itr=(0,)))
    train(large, optimizer, 1)
    target = SGD(small.parameters(), lr=0.1, settings=OFF)
    with pytest.raises(UserError, match="state to load is of 9 parameters, but this optimizer has 2"):
        target.gradskip.load_state_dict(optimizer.gradskip.state_dict())


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_carry_the_rule(duplicate: Callable[[Any], Any], cls: Any) -> None:
    model = make_model()
    settings = Settings(stop_layer_num=(1, 4), stop_layer_itr=(2, 6), braking_distance=2)
    optimizer = cls(model.parameters(), lr=0.1, settings=settings)
    train(model, optimizer, 4)
    other_model, other = duplicate((model, optimizer))
    train(model, optimizer, 6, start=4)
    train(other_model, other, 6, start=4)
    assert equal(weights(model), weights(other_model))
    assert other.gradskip.events == optimizer.gradskip.events
