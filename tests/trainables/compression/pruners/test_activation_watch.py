"""Which activation belongs to which convolution, and what is summed over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.compression.pruners.ranked import ActivationWatch


def images(count: int = 1, channels: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, channels, 6, 6, generator=generator) for _ in range(count)]


def conv(inputs: int = 3, filters: int = 5) -> nn.Conv2d:
    return nn.Conv2d(inputs, filters, 3, padding=1)


def slow_sums(activations: list[Tensor]) -> tuple[list[float], list[float]]:
    """Per channel over all batches: the share of values at most 0, and the mean."""
    shares, means = [], []
    for channel in range(activations[0].shape[1]):
        values = [v for batch in activations for v in batch[:, channel].flatten().tolist()]
        shares.append(sum(v <= 0 for v in values) / len(values))
        means.append(sum(values) / len(values))
    return shares, means


def check(watch: ActivationWatch, name: str, activations: list[Tensor]) -> None:
    shares, means = slow_sums([activation.detach() for activation in activations])
    sums = watch.sums[name]
    assert sums.inactive_share.tolist() == pytest.approx(shares, abs=1e-12)
    assert sums.mean.tolist() == pytest.approx(means, abs=1e-6)
    assert 0 < sum(shares) < len(shares)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_activation_behind_a_batch_norm(inplace: bool) -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(5), nn.ReLU(inplace), conv(5, 4), nn.ReLU(inplace))
    watch = ActivationWatch(["0.weight", "3.weight"])
    watch.start(model)
    first, second = [], []
    for batch in images(3):
        model(batch)
        with torch.no_grad():
            first.append(F.relu(F.batch_norm(model[0](batch), None, None, model[1].weight, model[1].bias, True)))
            second.append(F.relu(model[3](first[-1])))
    check(watch, "0.weight", first)
    check(watch, "3.weight", second)


@pytest.mark.parametrize(
    "activation",
    [nn.LeakyReLU(0.1), nn.SiLU(), nn.GELU(), nn.ReLU6(), nn.Hardswish(), nn.ELU(), nn.Hardtanh(), nn.PReLU()],
    ids=lambda module: type(module).__name__,
)
def test_activations_of_other_kinds(activation: nn.Module) -> None:
    model = nn.Sequential(conv(), activation)
    watch = ActivationWatch(["0.weight"])
    watch.start(model)
    batches = images(2)
    check(watch, "0.weight", [model(batch) for batch in batches])


class Residual(nn.Module):
    """As torchvision's blocks: one ReLU for both activations, a shortcut with a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv(3, 5), conv(5, 5), nn.Conv2d(3, 5, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
        self.relu = nn.ReLU(inplace=True)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        outer = self.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))
        self.seen.append((inner, outer))
        return outer


def test_calls_of_one_shared_activation_are_told_apart() -> None:
    model = Residual()
    watch = ActivationWatch(["conv1.weight", "conv2.weight", "shortcut.weight"])
    watch.start(model)
    for batch in images(3):
        model(batch)
    check(watch, "conv1.weight", [inner for inner, _ in model.seen])
    check(watch, "conv2.weight", [outer for _, outer in model.seen])
    check(watch, "shortcut.weight", [outer for _, outer in model.seen])


class Bottleneck(nn.Module):
    """A linear convolution before the next layer's activation, which has as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.next, self.relu = conv(3, 5), conv(5, 5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.next(self.linear(x)))


def without_activation(convolve: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [convolve(batch).relu() for batch in images(3)]


def test_an_activation_behind_another_layer_is_not_that_of_a_linear_bottleneck() -> None:
    model = Bottleneck()
    watch = ActivationWatch(["linear.weight"])
    watch.start(model)
    for batch in images(3):
        model(batch)
    watch.stop()
    check(watch, "linear.weight", without_activation(model.linear))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.conv(x))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Functional(), "conv"),
        (nn.Sequential(conv()), "0"),
        # An activation with other channels: of the flattened.
        (nn.Sequential(conv(), nn.Flatten(), nn.ReLU()), "0"),
        (nn.Sequential(conv().requires_grad_(False), nn.ReLU()), "0"),
    ],
    ids=["functional", "none", "flattened", "frozen"],
)
def test_where_there_is_none_it_is_relu_of_the_output(model: nn.Module, name: str) -> None:
    watch = ActivationWatch([f"{name}.weight"])
    watch.start(model)
    for batch in images(3):
        model(batch)
    watch.stop()
    check(watch, f"{name}.weight", without_activation(model.get_submodule(name)))


def test_evaluation_and_forwards_without_gradients_are_not_seen() -> None:
    model = nn.Sequential(conv(), nn.ReLU())
    watch = ActivationWatch(["0.weight"])
    watch.start(model)
    batches = images(4)
    model.eval()(batches[0])
    with torch.no_grad():
        model.train()(batches[1])
    assert watch.sums == {}
    outputs = [model(batches[2])]
    model.eval()(batches[0])
    model.train()
    outputs.append(model(batches[3]))
    check(watch, "0.weight", outputs)


def test_thinned_in_between_the_sums_are_those_of_the_new_filters() -> None:
    watch = ActivationWatch(["0.weight"])
    model = nn.Sequential(conv(), nn.ReLU())
    watch.start(model)
    model(images()[0])
    model[0] = conv(3, 4)
    watch.start(model)
    check(watch, "0.weight", [model(images()[0])])
