"""Biases before batch norms: those without effect are found, used ones never; without them the model is equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainables.training.doctor.checks import biases_before_norms, without_biases
from trainables.training.doctor.observation import ModelCall


class Net(nn.Module):
    """Layers by name, and a forward pass of (net, inputs)."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._run(self, inputs)


class AlwaysEvaluating(nn.BatchNorm2d):
    """A norm that stays in evaluation mode, as in detection: the bias counts then."""

    def train(self, mode: bool = True) -> AlwaysEvaluating:
        return super().train(False)


def residual(m: Any, images: Tensor) -> Tensor:
    """The first layer's output goes to the norm alone, the second's to the norm and around it."""
    around = m.second(F.relu(m.first_norm(m.first(images))))
    found: Tensor = around + m.second_norm(around)
    return found


def untraceable(m: Any, images: Tensor) -> Tensor:
    value = m.body(images)
    if value.sum() > 0:
        value = value + 1
    found: Tensor = m.norm(m.outside(value)) + m.outside.bias.sum()
    return found


def sharing() -> nn.Module:
    model = Net(lambda m, x: m.other(m.norm(m.layer(x))), layer=conv(), norm=norm(), other=conv())
    model.other.bias = model.layer.bias  # type: ignore[union-attr]
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(conv(), norm())
    model[0].register_forward_hook(lambda _, __, output: output)
    return model


def conv(inputs: int = 3, outputs: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, **more)


def norm(channels: int = 3, **more: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, **more)


IMAGES = (4, 3, 6, 6)
CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str]]] = [
    (lambda: nn.Sequential(conv(3, 4), norm(4)), IMAGES, {"0": "1"}),
    (lambda: nn.Sequential(conv(bias=False), norm()), IMAGES, {}),
    (lambda: nn.Sequential(conv(), nn.ReLU(), norm()), IMAGES, {}),
    (lambda: nn.Sequential(conv(3, 4), nn.GroupNorm(2, 4)), IMAGES, {}),
    (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), norm(4)), IMAGES, {"0": "1"}),
    (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (4, 3, 6), {"0": "1"}),
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3), {"0": "1"}),
    # The norm's channels are the second dimension, the linear layer's the last.
    (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 4, 3), {}),
    (lambda: nn.Sequential(conv(), norm(track_running_stats=False)), IMAGES, {"0": "1"}),
    (
        lambda: Net(residual, first=conv(), first_norm=norm(), second=conv(), second_norm=norm()),
        IMAGES, {"first": "first_norm"},
    ),
    (
        lambda: Net(untraceable, body=nn.Sequential(conv(), norm(), nn.ReLU()), outside=conv(), norm=norm()),
        IMAGES, {"body.0": "body.1"},
    ),
    # One layer in two places, behind one of which is no norm; a bias that is read; one that is two layers'.
    (lambda: Net(lambda m, x: m.layer(m.norm(m.layer(x))), layer=conv(), norm=norm()), IMAGES, {}),
    (
        lambda: Net(lambda m, x: m.norm(m.layer(x)) + m.layer.bias.view(1, -1, 1, 1), layer=conv(), norm=norm()),
        IMAGES, {},
    ),
    (sharing, IMAGES, {}),
    (lambda: nn.Sequential(conv(), AlwaysEvaluating(3)), IMAGES, {}),
    (hooked, IMAGES, {}),
]  # fmt: skip


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
    mended = without_biases(model, expected)
    assert set(model.state_dict()) - set(mended.state_dict()) == {f"{layer}.bias" for layer in expected}
    for mode in (True, False):
        with torch.no_grad():
            first, second = (copy.deepcopy(one).train(mode)(inputs) for one in (model, mended))
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    models = (model.train(), mended.train())
    for one in models:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(models[0].eval()(inputs), models[1].eval()(inputs), rtol=1e-7, atol=1e-7)
