"""Biases before batch norms: those without effect are found, used ones never; without them the model is equal."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainables.training.doctor.checks import biases_before_norms, renumbered, without_biases
from trainables.training.doctor.observation import ModelCall


class Residual(nn.Module):
    """The first layer's output goes to the norm alone, the second's to the norm and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        value = F.relu(self.first_norm(self.first(images)))
        around = self.second(value)
        found: Tensor = around + self.second_norm(around)
        return found


class Untraceable(nn.Module):
    """Its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.outside, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        value = self.body(images)
        if value.sum() > 0:
            value = value + 1
        return self.norm(self.outside(value)) + self.outside.bias.sum()  # type: ignore[union-attr]


class Twice(nn.Module):
    """One layer in two places: behind one of them is no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(self.layer(images)))
        return found


class ReadsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        assert self.layer.bias is not None
        found: Tensor = self.norm(self.layer(images)) + self.layer.bias.view(1, -1, 1, 1)
        return found


class FrozenNorm(nn.Module):
    """The norm stays in evaluation mode, as in detection: the bias counts then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(images))
        return found


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.other.bias = self.layer.bias

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.other(self.norm(self.layer(images)))
        return found


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model[0].register_forward_hook(lambda _, __, output: output)
    return model


IMAGES = (4, 3, 6, 6)
CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str]]] = [
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), IMAGES, {"0": "1"}),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), IMAGES, {}),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), IMAGES, {}),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), IMAGES, {}),
    (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), IMAGES, {"0": "1"}),
    (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (4, 3, 6), {"0": "1"}),
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3), {"0": "1"}),
    # The norm's channels are the second dimension, the linear layer's the last.
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 4, 3), {}),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), IMAGES, {"0": "1"}),
    (Residual, IMAGES, {"first": "first_norm"}),
    (Untraceable, IMAGES, {"body.0": "body.1"}),
    (Twice, IMAGES, {}),
    (ReadsBias, IMAGES, {}),
    (FrozenNorm, IMAGES, {}),
    (SharedBias, IMAGES, {}),
    (hooked, IMAGES, {}),
]


@pytest.mark.parametrize(("make", "shape", "expected"), CASES)
def test_only_biases_without_effect_are_found(
    make: Callable[[], nn.Module], shape: tuple[int, ...], expected: dict[str, str]
) -> None:
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(shape)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert biases_before_norms(model, ModelCall((inputs,))) == expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def trained(model: nn.Module, inputs: Tensor) -> nn.Module:
    """The model after steps in which biases and running means get values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("make", "shape", "expected"), [case for case in CASES if case[2]])
def test_without_them_outputs_and_further_training_are_equal(
    make: Callable[[], nn.Module], shape: tuple[int, ...], expected: dict[str, str]
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(shape, dtype=torch.float64)
    model = trained(make().double(), inputs)
    mended, convert = without_biases(model, expected)
    assert set(model.state_dict()) - set(mended.state_dict()) == {f"{layer}.bias" for layer in expected}
    for mode in (True, False):
        with torch.no_grad():
            first, second = (copy.deepcopy(one).train(mode)(inputs) for one in (model, mended))
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    # A state that the old model gets later fits the new one, too.
    mended.load_state_dict(convert(model.state_dict()))
    models = (model.train(), mended.train())
    for one in models:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(models[0].eval()(inputs), models[1].eval()(inputs), rtol=1e-7, atol=1e-7)


def test_numbers_of_the_parameters_that_stay() -> None:
    model = nn.Sequential(
        OrderedDict(a=nn.Conv2d(1, 2, 1), a_norm=nn.BatchNorm2d(2), b=nn.Conv2d(2, 2, 1), b_norm=nn.BatchNorm2d(2))
    )
    numbers = renumbered(model, {"b": "b_norm"})
    assert numbers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 7: 6}
