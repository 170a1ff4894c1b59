"""Layers whose rows are not the batch's samples: gradients of some samples must be those without any shortcut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampled_nets import cross_entropy
from torch import Tensor, nn

from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.layer_signals import treatable_layers
from trainables.gradients.zero_gradients import SlicedBackward, SlicedLayers, ZeroGradients

#: Samples of a batch, as many as features, steps of a sequence and rows of a table.
B = 6
KEEP = torch.tensor([0, 2, 3])


class Net(nn.Module):
    """Two layers with something between them.

    Args:
        between: (hidden (B, B), second layer) -> (B, classes or more).
        second: None: a linear layer.
    """

    def __init__(self, between: Callable[[Tensor, nn.Module], Tensor], second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(B, B)
        self.second = nn.Linear(B, B) if second is None else second
        self.last = nn.Linear(B, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x)), self.second))


class Table(nn.Module):
    """A linear layer on a parameter with as many rows as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(B, B))
        self.linear = nn.Linear(B, B)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.linear(self.rows).tanh()


def time_first(hidden: Tensor, layer: nn.Module) -> Tensor:
    steps = torch.stack([hidden * scale for scale in (0.5, 1.0, 2.0, -1.0, 0.1, 3.0)])  # (T, B, E), T = B
    found = layer(steps)
    return (found[0] if isinstance(found, tuple) else found).mean(0)


def sorted_within(hidden: Tensor, layer: nn.Module) -> Tensor:
    order = hidden[:, 0].argsort(descending=True)
    return torch.tanh(layer(hidden[order]))[order.argsort()]


AWKWARD: dict[str, Callable[[], Net]] = {
    "transformer, time first": lambda: Net(time_first, nn.TransformerEncoderLayer(B, 2, 8, dropout=0.0)),
    "LSTM, time first": lambda: Net(time_first, nn.Sequential(nn.Linear(B, B), nn.LSTM(B, B))),
    "a table of B rows": lambda: Net(lambda hidden, layer: layer(hidden), Table()),
    "sorted and unsorted": lambda: Net(sorted_within),
    "rolled": lambda: Net(lambda hidden, layer: layer(hidden.roll(1, 0)).tanh().roll(-1, 0)),
    "features first": lambda: Net(lambda hidden, layer: layer(hidden.t()).tanh().t()),
    "attention over the batch": lambda: Net(lambda h, layer: torch.softmax(h @ h.t(), 1) @ layer(h).tanh()),
    "centred by the batch": lambda: Net(lambda hidden, layer: layer(hidden).tanh() - layer(hidden).tanh().mean(0)),
    "compared with all others": lambda: Net(lambda hidden, layer: layer(hidden) @ hidden.t()),
    "flipped images": lambda: Net(
        lambda hidden, layer: layer(hidden.flip(0).view(B, 1, 2, 3)).tanh().flip(0).flatten(1), nn.Conv2d(1, 1, 1)
    ),
}
PLAIN: dict[str, Callable[[], Net]] = {
    "linear": lambda: Net(lambda hidden, layer: torch.relu(layer(hidden))),
    "images": lambda: Net(lambda hidden, layer: layer(hidden.view(B, 1, 2, 3)).tanh().flatten(1), nn.Conv2d(1, 1, 1)),
    "transformer, batch first": lambda: Net(
        lambda hidden, layer: layer(torch.stack([hidden, -hidden], 1)).mean(1),
        nn.TransformerEncoderLayer(B, 2, 8, dropout=0.0, batch_first=True),
    ),
}


def gradients(net: Net, x: Tensor, y: Tensor, layers: SlicedLayers | None) -> tuple[list[Tensor], int]:
    """Gradients of the loss of `KEEP` alone, in a plain backward pass or in one through these rows."""
    mode = SlicedBackward(B, layers)
    with mode if layers is not None else torch.enable_grad():
        output = net(x)
        weights = torch.zeros(B).index_fill_(0, KEEP, 1.0)
        mode.keep = KEEP
        loss = (F.cross_entropy(output, y, reduction="none") * weights).mean()
        found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in found], mode.spared_flops


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, B, generator=generator), torch.randint(0, 3, (B,), generator=generator)


@pytest.mark.parametrize("name", [*AWKWARD, *PLAIN])
def test_gradients_of_some_samples_are_the_unsliced_ones(name: str) -> None:
    torch.manual_seed(1)
    net = {**AWKWARD, **PLAIN}[name]()
    layers = SlicedLayers(net)
    for seed in range(3):
        expected, _ = gradients(net, *batch(seed), None)
        found, spared = gradients(net, *batch(seed), layers)
        torch.testing.assert_close(found, expected)
        assert spared > 0  # the last layer, at least
    assert "last" not in layers.whole
    assert bool(layers.whole) == (name in AWKWARD)
    if name in AWKWARD:
        with pytest.warns(UserWarning, match=r"are not those of the batch's samples, or depend on other samples"):
            layers.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.warn()  # each is named once


@pytest.mark.parametrize("name", [*AWKWARD, *PLAIN])
@pytest.mark.parametrize(
    ("kind", "options"), [(ZeroGradients, {"threshold": 0.8}), (ImportanceSampling, {"by": "gradient"})]
)
def test_methods_tell_the_layers_that_they_leave_alone(
    name: str, kind: type[GradientMethod], options: dict[str, Any]
) -> None:
    """In training: which samples are left out depends on their losses."""
    torch.manual_seed(1)
    net = {**AWKWARD, **PLAIN}[name]()
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*map(batch, range(4)), strict=True)))
    method = kind(net, cross_entropy, data, torch.optim.SGD(net.parameters(), lr=0.1), batch_size=B, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            method.step()
    told = [str(warning.message) for warning in caught if "rows of" in str(warning.message)]
    assert bool(told) == (name in AWKWARD), told
    assert not any("last" in text for text in told)
    if isinstance(method, ImportanceSampling):
        assert "last" in method.layers
        assert (method.layers.keys() == treatable_layers(net).keys()) == (name in PLAIN)
