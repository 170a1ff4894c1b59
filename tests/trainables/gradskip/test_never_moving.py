"""Layers that never move, for which a rule would wait in vain, are named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from trainables.gradskip import SGD, Settings

RULES = {
    "variance": Settings(watch=("linear",), start_itr=0, start_thr=0.97, mt_thr=0.97, slope_thr=0.97, samples=5),
    "gradient_norm": Settings(watch=("linear",), rule="gradient_norm", rule_interval=10, rule_percentile=70.0),
    "grades": Settings(watch=("linear",), rule="grades", rule_interval=5, rule_tau=1e-9),
    "plasticity": Settings(watch=("linear",), rule="plasticity", rule_interval=5, rule_window=2, rule_tolerance=0.9),
}


class Network(nn.Module):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.first, self.rest = nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(x) if self.moves else self.first(x).detach())
        return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("moves", [True, False])
def test_a_layer_that_never_moves_is_named_once(rule: str, moves: bool) -> None:
    torch.manual_seed(0)
    model = Network(moves)
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=0.1, settings=RULES[rule], model=model)
    inputs = torch.randn(16, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(60):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    still = [str(one.message) for one in said if "does not move" in str(one.message)]
    assert len(still) == (0 if moves else 1)
    assert all(text.startswith("first.weight does not move (no gradient, or a learning rate of 0)") for text in still)
