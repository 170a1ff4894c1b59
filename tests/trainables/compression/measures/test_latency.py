"""What is timed, and that timing leaves no trace; no test depends on how long anything took."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.measures.latency import REPEATS, WARM_UP, latency
from trainables.errors import UserError


class Watched(nn.Module):
    """Notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout()
        self.calls: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.append((len(x), self.training, torch.is_grad_enabled()))
        torch.rand(1)
        result: Tensor = self.dropout(self.norm(self.layer(x))) * scale
        return result


def test_passes_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Watched()
    took = [90.0] * WARM_UP + [3.0, 1.0] * (REPEATS // 2)
    clock = iter([moment for number, time in enumerate(took) for moment in (100 * number, 100 * number + time)])
    monkeypatch.setattr("trainables.compression.measures.latency.time.perf_counter", lambda: next(clock))
    assert latency(model, torch.zeros(6, 3)) == 2  # the median, without the warm-up
    assert model.calls == [(1, False, False)] * (WARM_UP + REPEATS)


def test_modes_gradients_buffers_and_generators_are_as_before() -> None:
    model = Watched()
    model.norm.eval()
    model.layer.weight.grad = torch.ones(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    latency(model, torch.randn(6, 3, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [m.training for m in (model, model.layer, model.norm, model.dropout)] == [True, True, False, True]
    assert torch.equal(model.layer.weight.grad, torch.ones(2, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_modes_come_back_after_an_error() -> None:
    model = Watched()
    with pytest.raises(RuntimeError, match="shapes"):
        latency(model, torch.zeros(6, 4))
    assert model.training
    assert torch.is_grad_enabled()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(UserError, match=r"^a latency needs an example with at least one tensor of samples, got none$"):
        latency(Watched(), (1.0, torch.zeros(())))
