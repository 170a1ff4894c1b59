"""Models and loops off the beaten path: frozen layers, parameters of containers, toggles, steps that raise."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from conv_models import conv_batches, conv_model
from loops import equal, train, weights
from torch import nn

from trainables.gradskip import SGD, ForwardCache, Settings, wrap

MANUAL = Settings(stop_layer_num=(3,), stop_layer_itr=(2,))


pytestmark = pytest.mark.usefixtures("quiet")


def test_a_step_that_calls_its_base_class_is_one_step() -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch hooks a class's step when one is first built

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for parent_first in (False, True):
        model = conv_model()
        settings = Settings(stop_layer_num=(3,), stop_layer_itr=(2,), braking_distance=3)
        optimizer: Any = wrap(Own(model.parameters(), lr=0.01), settings)
        history = [weights(model)[0]]
        train(model, optimizer, 8, each=lambda _, m=model, h=history: h.append(weights(m)[0]))  # type: ignore[misc]
        assert optimizer.gradskip.iteration == 8, parent_first
        # Steps 2 and 3 brake, step 4 multiplies by 0.
        assert [not torch.equal(a, b) for a, b in pairwise(history)] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("rule", ["gradient_norm"])
def test_a_rule_on_gradients_with_a_closure_is_refused(rule: str) -> None:
    model = conv_model()
    optimizer = SGD(model.parameters(), lr=0.1, settings=Settings(rule=rule))
    with pytest.raises(RuntimeError, match="looks at gradients before the step and a closure makes them in it"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("hold", ["go_on", "hold"])
@pytest.mark.parametrize("prefix_autograd", [True, False])
def test_a_resumed_run_has_been_seen_already(hold: str, prefix_autograd: bool) -> None:
    """Loaded before its first forward pass, also inside a forward cache, it is the run that went on."""
    settings = Settings(stop_layer_num=(4,), stop_layer_itr=(2,), norm_statistics=hold, prefix_autograd=prefix_autograd)

    def build() -> tuple[nn.Module, SGD]:
        model = conv_model()
        return model, SGD(model.parameters(), lr=0.1, settings=settings, model=model)

    whole, whole_optimizer = build()
    train(whole, whole_optimizer, 4)
    resumed, optimizer = build()
    resumed.load_state_dict(whole.state_dict())
    optimizer.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    train(whole, whole_optimizer, 3, start=4)
    with ForwardCache(resumed, samples=6, budget_bytes=0) as cache:
        for x, y in list(conv_batches(7))[4:]:
            optimizer.zero_grad()
            with cache.running() if hold == "hold" else warnings.catch_warnings():
                loss = nn.functional.cross_entropy(resumed(x), y)
            loss.backward()
            optimizer.step()
    assert equal(weights(whole), weights(resumed))
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), resumed.buffers(), strict=True))
