"""Filters ranked by activations and gradients: whose activation is whose, who goes, what is forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.compression.pruners import ApozPruner, Pruner, build_pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError


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


def watching(model: nn.Module, *weights: str) -> ApozPruner:
    given = {"weights": weights, "group_type": "Filters", "desired_sparsity": 0.5}
    pruner = build_pruner("p", PRUNERS["ActivationAPoZRankedFilterPruner"](**given), model, seed=0)
    assert isinstance(pruner, ApozPruner)
    pruner.start(model)
    return pruner


def check(watch: ApozPruner, name: str, activations: list[Tensor]) -> None:
    shares, means = slow_sums([activation.detach() for activation in activations])
    inactive, total, seen = watch.sums[name]
    assert (inactive.double() / seen).tolist() == pytest.approx(shares, abs=1e-12)
    assert (total / seen).tolist() == pytest.approx(means, abs=1e-6)
    assert 0 < sum(shares) < len(shares)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_activation_behind_a_batch_norm(inplace: bool) -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(5), nn.ReLU(inplace), conv(5, 4), nn.ReLU(inplace))
    watch = watching(model, "0.weight", "3.weight")
    first, second = [], []
    for batch in images(3):
        model(batch)
        with torch.no_grad():
            first.append(F.relu(F.batch_norm(model[0](batch), None, None, model[1].weight, model[1].bias, True)))
            second.append(F.relu(model[3](first[-1])))
    check(watch, "0.weight", first)
    check(watch, "3.weight", second)


def test_a_watched_model_can_be_copied_between_passes() -> None:
    model = nn.Sequential(conv(), nn.ReLU(), conv(5, 4), nn.Conv2d(4, 4, 1))  # two of them without an activation
    watch = watching(model, "0.weight", "2.weight", "3.weight")
    model(images()[0])
    copy.deepcopy(model)
    watch.start(model)  # the search begins anew
    copy.deepcopy(model)


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
    watch = watching(model, "conv1.weight", "conv2.weight", "shortcut.weight")
    for batch in images(3):
        model(batch)
    check(watch, "conv1.weight", [inner for inner, _ in model.seen])
    check(watch, "conv2.weight", [outer for _, outer in model.seen])
    check(watch, "shortcut.weight", [outer for _, outer in model.seen])


def without_activation(convolve: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [convolve(batch).relu() for batch in images(3)]


class Bottleneck(nn.Module):
    """A linear convolution before the next layer's activation, which has as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.next, self.relu = conv(3, 5), conv(5, 5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.next(self.linear(x)))


def test_an_activation_behind_another_layer_is_not_that_of_a_linear_bottleneck() -> None:
    model = Bottleneck()
    watch = watching(model, "linear.weight")
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
    watch = watching(model, f"{name}.weight")
    for batch in images(3):
        model(batch)
    watch.stop()
    check(watch, f"{name}.weight", without_activation(model.get_submodule(name)))


def test_evaluation_and_forwards_without_gradients_are_not_seen() -> None:
    model = nn.Sequential(conv(), nn.ReLU())
    watch = watching(model, "0.weight")
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


NOW = Moment(epoch=0, timing=Timing())
SEEN = ["ActivationAPoZRankedFilterPruner", "ActivationMeanRankedFilterPruner", "GradientRankedFilterPruner"]


def model_of(filters: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, filters, 3), nn.ReLU(), nn.Conv2d(filters, filters, 3), nn.ReLU())


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(count)]


def pruner_of(class_: str, model: nn.Module, share: float = 0.5, **arguments: Any) -> Pruner:
    given = {"weights": ["0.weight"], "group_type": "Filters", "desired_sparsity": share, **arguments}
    return build_pruner("p", PRUNERS[class_](**given), model, seed=0)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gone(mask: Tensor) -> list[int]:
    rows = mask.flatten(1)
    assert bool(((rows == rows[:, :1]).all(dim=1)).all())
    return [i for i, row in enumerate(rows.tolist()) if row[0] == 0]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.2, 1), (0.5, 3), (0.99, 5), (1.0, 6)])
@pytest.mark.parametrize(("class_", "largest_first"), [(SEEN[0], True), (SEEN[1], False)])
def test_most_zeros_or_smallest_mean_first(class_: str, largest_first: bool, share: float, count: int) -> None:
    model = model_of()
    pruner = pruner_of(class_, model, share)
    pruner.start(model)
    outputs = []
    for batch in batches(3):
        model(batch)
        outputs.append(model[0](batch).relu().detach())
    values = torch.cat(outputs).transpose(0, 1).flatten(1)
    scores = [sum(v == 0 for v in row) if largest_first else sum(row) for row in values.tolist()]
    assert len(set(scores)) == 6
    order = sorted(range(6), key=lambda i: scores[i], reverse=largest_first)
    assert gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"]) == sorted(order[:count])


@pytest.mark.parametrize(("share", "count"), [(0.2, 1), (0.5, 3)])
def test_smallest_first_order_change_of_the_loss_first(share: float, count: int) -> None:
    model = model_of()
    pruner = pruner_of("GradientRankedFilterPruner", model, share)
    pruner.start(model)
    sums = [0.0] * 6
    direction = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(7))
    for batch in batches(3):
        model.zero_grad()
        (model(batch) * direction).sum().backward()
        gradient = model[0].weight.grad
        for i in range(6):
            pairs = zip(gradient[i].flatten().tolist(), model[0].weight[i].flatten().tolist(), strict=True)
            sums[i] += sum(g * w for g, w in pairs)
        with torch.no_grad():
            model[0].weight.sub_(0.001 * gradient)
    order = sorted(range(6), key=lambda i: abs(sums[i]))
    # Some sums are negative, so that the absolute value matters.
    signed = sorted(range(6), key=lambda i: sums[i])
    assert sorted(order[:count]) == gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])
    assert sorted(signed[:count]) != sorted(order[:count])


def train(model: nn.Module, count: int = 1) -> None:
    for batch in batches(count):
        model.zero_grad()
        model(batch).square().sum().backward()


@pytest.mark.parametrize("class_", SEEN)
def test_nothing_seen_nothing_decided_and_what_was_seen_is_forgotten(class_: str) -> None:
    model = model_of()
    pruner = pruner_of(class_, model)
    assert pruner.epochs_before == 1
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    pruner.start(model)
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    train(model)
    assert len(gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])) == 3
    assert pruner.masks(weights_of(model), {}, NOW) == {}


def test_a_weight_that_is_frozen_first_is_seen_once_it_trains() -> None:
    model = model_of()
    model[0].weight.requires_grad_(False)
    pruner = pruner_of("GradientRankedFilterPruner", model)
    pruner.start(model)
    assert not model[0].weight.requires_grad
    train(model)
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    model[0].weight.requires_grad_(True)
    train(model)
    assert len(gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])) == 3


@pytest.mark.parametrize("class_", SEEN[:2])
def test_a_weight_that_is_no_convolutions_is_refused_at_once(class_: str) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3))
    with pytest.raises(UserError, match=r"needs weights of convolutions, got 0\.weight of ConvTranspose2d"):
        pruner_of(class_, model)
