"""Parameters that are used more than once: what lies before them is what lies before their first use."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from loops import weights
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.gradskip import SGD, Settings
from trainables.gradskip.execution_order import ModelTrace, trace_model


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    """A convolution that runs first and again after another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.shared(x))
        x = torch.relu(self.shared(torch.relu(self.other(x))))
        return self.last(x)


TOKENS = torch.arange(20).reshape(4, 5) % 13
IMAGES = torch.linspace(-1, 1, 2 * 4 * 36).reshape(2, 4, 6, 6)


def backward_flops(model: nn.Module, x: Tensor) -> int:
    loss = model(x).square().sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return int(counter.get_total_flops())


def run(model: nn.Module, x: Tensor, settings: Settings, steps: int = 3) -> SGD:
    optimizer = SGD(model.parameters(), lr=0.01, settings=settings, model=model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_lies_before_is_of_the_first_use() -> None:
    model = Tied(1)
    trace = trace_model(model, list(model.parameters()), lambda m: m(TOKENS))
    assert trace.upstream[0] == 0
    assert trace.ranks[0] == min(trace.ranks)
    assert trace.before["head"] == (1 << len(trace.ranks)) - 1  # the head's input depends on everything
    model = Twice()
    trace = trace_model(model, list(model.parameters()), lambda m: m(IMAGES))
    assert list(trace.upstream) == [0, 0, 0b11, 0b11, 0b1111, 0b1111]
    assert trace.before["shared"] == 0b1111


@pytest.mark.parametrize("prefix_autograd", [True, False])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_tied_prefix_saves_all_it_can_without_a_word(blocks: int, prefix_autograd: bool) -> None:
    """The embedding and some blocks stop: no warning, nothing else stops, and the FLOPs are those of a frozen model."""
    model = Tied()
    through = 12 * blocks
    settings = Settings(stop_layer_num=(through,), stop_layer_itr=(0,), prefix_autograd=prefix_autograd)
    optimizer = run(model, TOKENS, settings)
    assert optimizer.gradskip.stopped == tuple(range(through + 1))
    assert optimizer.gradskip.left_upstream() == []
    frozen = Tied()
    for parameter in list(frozen.parameters())[: through + 1]:
        parameter.requires_grad_(False)
    assert backward_flops(model, TOKENS) == backward_flops(frozen, TOKENS)


@pytest.mark.parametrize("prefix_autograd", [True, False])
def test_what_runs_between_two_uses_trains_on(prefix_autograd: bool) -> None:
    """The gradient must pass the second use of the stopped convolution to reach the other one."""
    model, frozen = Twice(), Twice()
    settings = Settings(stop_layer_num=(1,), stop_layer_itr=(0,), prefix_autograd=prefix_autograd)
    optimizer = run(model, IMAGES, settings, steps=1)
    frozen.load_state_dict(model.state_dict())
    frozen.shared.requires_grad_(False)
    plain = torch.optim.SGD(frozen.parameters(), lr=0.01)
    for each, net in ((optimizer, model), (plain, frozen)):
        for _ in range(3):
            each.zero_grad()
            net(IMAGES).square().mean().backward()
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(frozen), strict=True))
    assert optimizer.gradskip.stopped == (0, 1)


@pytest.mark.slow
def test_without_a_trace_the_module_that_shares_a_weight_is_not_cut() -> None:
    """Compiled models show no order; a head that shares the embedding must let the gradient through."""
    torch._dynamo.reset()
    model = Tied(1)
    compiled: Any = torch.compile(model, backend="eager")
    settings = Settings(stop_layer_num=(0,), stop_layer_itr=(0,), prefix_autograd=False)
    optimizer = SGD(model.parameters(), lr=0.01, settings=settings, model=compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            optimizer.zero_grad()
            compiled(TOKENS).square().mean().backward()
            optimizer.step()
    assert all(p.grad is not None for p in list(model.parameters())[1:])


def test_the_state_of_a_trace_comes_back() -> None:
    for model, x in ((Tied(), TOKENS), (Twice(), IMAGES)):
        trace = trace_model(model, list(model.parameters()), lambda m, x=x: m(x))  # type: ignore[misc]
        assert ModelTrace.from_state(trace.state_dict()) == trace
