"""Copies of models that keep what their latest pass computed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.thinning import thin
from trainables.gradskip.forward_cache import ForwardCache
from trainables.runtime.model_copy import copy_of


class KeepsActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.tied = self.first.weight
        self.features: list[Tensor] = []
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.first(x)
        self.features = [self.latest, self.latest.relu()]
        self.features.append(self.last(self.features[1]))
        return self.features[-1]


def test_kept_activations_are_copied_without_their_history() -> None:
    model = KeepsActivations()
    out = model(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    twin = copy_of(model)
    assert twin.tied is twin.first.weight is not model.tied
    assert twin.latest is twin.features[0]
    assert twin.latest.is_leaf
    assert torch.equal(twin.latest, model.latest)
    out.sum().backward()  # the model's own history is still there
    assert twin.first.weight.grad is None
    assert model.first.weight.grad is not None


def test_a_forward_cache_reads_for_such_a_model() -> None:
    model = KeepsActivations()
    model.first.requires_grad_(False)
    x = torch.randn(12, 4)
    with ForwardCache(model, budget_bytes=10**6) as cache:
        for _ in range(3):
            for batch in x.split(8):
                with cache.running():
                    assert torch.equal(model(batch), model.last(model.first(batch).relu()))
        assert cache.hits == 2 * len(x)


def test_such_a_model_is_thinned_in_the_middle_of_a_training() -> None:
    model, x = KeepsActivations(), torch.randn(12, 4)
    model(x).sum().backward()
    with torch.no_grad():
        model.first.weight[1:3] = model.first.bias[1:3] = 0
    del model.tied  # shared parameters are not cut
    before = model(x)
    assert thin(model, (x,)).exact
    assert model.first.weight.shape == (2, 4)
    torch.testing.assert_close(model(x), before)
