"""States of `gradskip.SGD`: resumed at any iteration, loaded from and into torch's, copied."""

from __future__ import annotations

import pytest
import torch
from conv_models import short_conv_model as make_model
from loops import OFF, train
from torch import nn

from trainables.errors import UserError
from trainables.gradskip import SGD, Settings


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
