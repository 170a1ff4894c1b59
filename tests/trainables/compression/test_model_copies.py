"""Copies share nothing with their model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.model_copies import (
    bare_copy,
    float_tensor,
    hookless_copy,
)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parametrize.register_parametrization(model[0], "weight", Double())
    parametrize.register_parametrization(model[0], "bias", Double())
    return model


def test_a_bare_copy_has_the_float_weights_and_leaves_the_model_its_class() -> None:
    model, x = parametrized(), torch.rand(4, 3)
    before = model(x).detach()
    bare = bare_copy(model)
    assert type(bare[0]) is nn.Linear
    assert [name for name, _ in bare.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    original = float_tensor(model[0], "weight")
    assert original is not None
    assert torch.equal(bare[0].weight, original)
    with torch.no_grad():
        bare[0].weight.zero_()
    assert torch.equal(model(x), before)
    assert torch.equal(model[0].weight, 2 * original)


def test_copies_have_no_hooks_and_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model[1].register_forward_pre_hook(lambda *_: seen.append(2))
    found = hookless_copy(model)
    found(torch.zeros(2, 3))
    assert seen == []
    assert found[0].weight is found[1].weight
    assert found[0].weight is not model[0].weight
    model(torch.zeros(2, 3))
    assert seen == [1, 2]
