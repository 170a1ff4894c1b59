"""Losses at changed weights: activations of which only some channels are computed anew, and the memory of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables.gradients import (
    BinaryActivation,
    CentralDifferenceSGD,
    autograd_gradient,
    central_difference,
    relative_error,
)
from trainables.gradients.perturbations import ChannelPart, Perturbations

torch.manual_seed(0)
IMAGES = torch.randn(3, 5, 6, 6, dtype=torch.float64)
OTHER = torch.randn(3, 5, 6, 6, dtype=torch.float64)
KERNEL = torch.randn(4, 5, 3, 3, dtype=torch.float64)
MATRIX = torch.randn(7, 180, dtype=torch.float64)
NORM = nn.BatchNorm2d(5).double()
nn.init.normal_(NORM.weight)
nn.init.normal_(NORM.bias)


def changed() -> tuple[ChannelPart, Tensor]:
    """Channels 2 and 3 changed: as a part, and as a whole."""
    part = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    whole = IMAGES.clone()
    whole[:, 2:4] = part
    return ChannelPart(IMAGES, part, 2, 1), whole


#: Operations, and whether their result is still known by parts.
OPERATIONS: list[tuple[str, Callable[[Any], Any], bool]] = [
    ("relu", F.relu, True),
    ("relu in place", lambda x: F.relu(x, inplace=True), True),
    ("module", nn.GELU(), True),
    ("method", lambda x: x.tanh(), True),
    ("binary", BinaryActivation(), True),
    ("max pool", nn.MaxPool2d(2), True),
    ("average pool", nn.AvgPool2d(3, stride=2, padding=1), True),
    ("adaptive pool", nn.AdaptiveAvgPool2d(2), True),
    ("batch norm", lambda x: F.batch_norm(x, NORM.running_mean, NORM.running_var, NORM.weight, NORM.bias), True),
    ("batch statistics", lambda x: F.batch_norm(x, None, None, NORM.weight, NORM.bias, training=True), True),
    ("flatten", lambda x: x.flatten(1), True),
    ("flatten module", nn.Flatten(), True),
    ("view", lambda x: x.view(x.size(0), -1), True),
    ("shortcut", lambda x: x + OTHER, True),
    ("shortcut from the left", lambda x: OTHER + x, True),
    ("shortcut of itself", lambda x: F.relu(x) + x, False),
    ("scaled", lambda x: 2 * x * 0.5 + 1, True),
    ("convolution", lambda x: F.conv2d(x, KERNEL, torch.ones(4).double(), stride=2, padding=1), False),
    ("grouped", lambda x: F.conv2d(x, torch.ones(5, 1, 2, 2).double(), groups=5), False),
    ("linear", lambda x: F.linear(x.flatten(1), MATRIX, torch.ones(7).double()), False),
    ("last dimension", lambda x: F.linear(x, torch.ones(2, 6).double()), False),
    ("softmax", lambda x: x.softmax(1), False),
    ("mean", lambda x: x.mean((2, 3)), False),
    ("concatenated", lambda x: torch.cat([x, OTHER], 1), False),
    ("difference", lambda x: (1 - x) / 2 - x**2, False),
    ("cut", lambda x: x[:, 1:3], False),
    ("other view", lambda x: x.view(9, -1), False),
    ("layer norm", lambda x: F.layer_norm(x, (6, 6)), False),
    ("dropout off", lambda x: F.dropout(x, 0.5, training=False), False),
    ("a part and a part", lambda x: torch.add(x, x), False),
]


@pytest.mark.parametrize(("operation", "by_parts"), [o[1:] for o in OPERATIONS], ids=[o[0] for o in OPERATIONS])
def test_is_the_whole_activation(operation: Callable[[Any], Any], by_parts: bool) -> None:
    part, whole = changed()
    found, expected = operation(part), operation(whole)
    assert isinstance(found, ChannelPart) == by_parts
    torch.testing.assert_close(found.whole() if by_parts else found, expected)
    if by_parts:
        assert (tuple(found.shape), found.dim(), found.dtype) == (tuple(expected.shape), 4 if found.ndim == 4 else 2,
                                                                  torch.float64)  # fmt: skip


class Residual(nn.Module):
    """A block as in a ResNet, with operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(2, 6, 1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.norm(self.first(x))))
        out += self.shortcut(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.relu(out), 1), 1))


class Refusing(nn.Module):
    """A model that looks at the type of its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if not isinstance(hidden, Tensor):
            raise TypeError("a tensor, please")
        return hidden.tanh()


@pytest.mark.parametrize("model", [Residual(), Refusing()], ids=["residual", "refusing"])
def test_rows_are_the_changes_in_the_weights(model: nn.Module) -> None:
    model = model.double()
    x = torch.randn(3, 9, dtype=torch.float64) if isinstance(model, Refusing) else IMAGES[:, :2]
    name = "layer.weight" if isinstance(model, Refusing) else "first.weight"

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    parameter = dict(model.named_parameters())[name]
    count = parameter.numel()
    losses = Perturbations(loss, model, chunk_size=1000, flop_counts={})
    found = losses.losses(name, torch.arange(count).repeat(2), torch.full((2 * count,), 0.1, dtype=torch.float64))
    assert torch.equal(found[:count], found[count:])
    for index in range(0, count, 7):
        with torch.no_grad():
            model.train()
            before = {n: b.clone() for n, b in model.state_dict().items()}
            parameter.view(-1)[index] += 0.1
            expected = loss(model)
            model.load_state_dict(before)
        torch.testing.assert_close(found[index], expected)


X = torch.randn(6, 12, dtype=torch.float64)


def plain(m: nn.Module) -> Tensor:
    return m(X).sin().sum()


def in_place(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    F.relu_(hidden)
    return m[2](hidden).sin().sum()


def by_keyword(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    torch.relu_(input=hidden)
    return m[2](hidden).sin().sum()


def far_from_zero(m: nn.Module) -> Tensor:
    return in_place(m) + 1e4


def assigned(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    hidden[:, 0] = 1.0
    return m[2](hidden).sin().sum()


def method(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    before = hidden
    hidden += 0.25
    before.clamp_(-0.5, 0.5)
    return m[2](hidden).sin().sum()


def kept(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    also = hidden
    hidden *= 2.0
    return (m[2](hidden) + m[2](also)).sin().sum()


@pytest.mark.parametrize("loss", [in_place, by_keyword, far_from_zero, assigned, method, kept])
def test_writing_into_an_activation_is_seen_whatever_loss_came_before(loss: Callable[[nn.Module], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = CentralDifferenceSGD(model, lr=1e-9, epsilon=1e-5)
    optimizer.step(plain)
    exact = autograd_gradient(loss, model)
    optimizer.step(loss)
    for found in (central_difference(loss, model, 1e-5), {n: p.grad for n, p in model.named_parameters()}):
        assert relative_error(found, exact) < 1e-4


def test_chunks_bound_the_memory_and_change_no_value() -> None:
    """What is allocated is seen by torch's dispatcher, not by the engine."""

    class Allocated(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(tensor, Tensor):
                    self.most = max(self.most, tensor.nbytes)
            return found

    model = nn.Sequential(nn.Conv2d(1, 24, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 10)).double()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    free = central_difference(loss, model, 1e-2, "0.weight")
    with Allocated() as seen:
        small = central_difference(loss, model, 1e-2, "0.weight", memory_bytes=2**20)
    torch.testing.assert_close(small, free, rtol=1e-9, atol=1e-12)
    assert seen.most <= 2**20
    with Allocated() as seen:
        central_difference(loss, model, 1e-2, "0.weight")
    assert seen.most > 2**20
