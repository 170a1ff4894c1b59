"""Outputs and latencies of two models beside each other."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_workload import Tiny
from torch import Tensor, nn

from trainables.deployment.call import Call
from trainables.deployment.comparison import call_of, compare, latencies
from trainables.errors import UserError


class Shifted(nn.Module):
    """Another model's outputs, of one sign more by a tenth."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y + 0.1 * y.square().mean().sqrt()


def test_the_difference_is_a_share_of_the_outputs_size() -> None:
    torch.manual_seed(0)
    workload, metric = Tiny(), Tiny().quality.name
    model = workload.make_model().eval()
    same = compare(model, copy.deepcopy(model), workload, metric)
    assert same.difference == 0
    assert same.samples == sum(len(batch[0]) for batch in workload.evaluation_batches("validation") or ())
    assert same.metrics == workload.metrics_on(model, "validation", torch.device("cpu"), metric)
    assert math.isclose(compare(model, Shifted(model), workload, metric).difference, 0.1, rel_tol=0.02)


def test_a_call_is_caught_before_the_model_runs() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, flag: bool) -> Tensor:
            raise AssertionError

    model = Refuses()
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])
    found = call_of(model, lambda: model(x, mask=mask, flag=True))
    assert torch.equal(found.args[0], x)
    again = found.repeated(5)
    assert torch.equal(again.kwargs["mask"], torch.tensor([1, 0, 1, 0, 1]))
    assert again.args[0].shape == (5, 3)
    assert again.kwargs["flag"] is True
    with pytest.raises(UserError, match="without a call of its model"):
        call_of(model, lambda: None)


def test_latencies_are_of_the_calls_in_turns() -> None:
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self) -> None:
            order.append(self.name)

    found = latencies(Named("a"), Named("b"), Call((), {}), rounds=5, round_s=0.0)
    assert "".join(order) == "aaabbb" + 5 * "ab"
    assert found.low <= found.ratio <= found.high
