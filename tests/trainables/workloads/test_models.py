"""Models are those of their papers: sizes, multiply-adds, names, initial weights."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.errors import UserError
from trainables.workloads.models import MODELS, build_model
from trainables.workloads.models.resnet import BasicBlock, PaddedShortcut

#: Classes, side in pixels, parameters, multiply-adds in billions: as published (He et al. 2016; torchvision's tables).
PUBLISHED = {
    "resnet20": (10, 32, 269_722, 0.0408),
    "resnet56": (10, 32, 853_018, 0.1265),
    "resnet18": (1000, 224, 11_689_512, 1.814),
    "resnet50": (1000, 224, 25_557_032, 4.089),
    "alexnet": (1000, 224, 61_100_840, 0.714),
    "vgg16": (1000, 224, 138_357_544, 15.47),
}


def on_meta(name: str, classes: int, image_size: int | None = None, channels: int = 3) -> nn.Module:
    """The model without numbers: large ones cost neither time nor memory."""
    with torch.device("meta"):
        return build_model(name, classes, image_size, channels)


def images(size: int, channels: int = 3) -> Tensor:
    return torch.empty(2, channels, size, size, device="meta")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_multiply_adds_are_the_published_ones(name: str) -> None:
    classes, size, parameters, billions = PUBLISHED[name]
    model = on_meta(name, classes)
    assert MODELS[name].image_size == size
    assert sum(p.numel() for p in model.parameters()) == parameters
    with FlopCounterMode(display=False) as counter:
        scores = model(images(size))
    assert scores.shape == (2, classes)
    # The figures of the two small ones count a multiply-add for each output of a norm as well.
    assert counter.get_total_flops() / 2 / 2 == pytest.approx(billions * 1e9, rel=0.01)


#: First digits of the SHA-256 of the lines "name [shape]" of torchvision's state_dict, 0.29.2, with 1000 classes.
TORCHVISION = {
    "resnet18": "66b04efc1dfd4b80",
    "resnet50": "614cd53ddf849669",
    "alexnet": "23c3b8d4a3e86dc8",
    "vgg16": "8a41c838cadbc3e0",
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_shapes_and_order_are_those_of_torchvision(name: str) -> None:
    lines = [f"{path} {list(value.shape)}" for path, value in on_meta(name, 1000).state_dict().items()]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == TORCHVISION[name]


@pytest.mark.parametrize("side", [7, 8])
def test_option_a_is_subsampling_and_zero_channels(side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 8, (side + 1) // 2, (side + 1) // 2)
    for row in range(0, side, 2):
        for column in range(0, side, 2):
            expected[:, :3, row // 2, column // 2] = x[:, :, row, column]
    assert torch.equal(PaddedShortcut(3, 8, stride=2)(x), expected)
    block = BasicBlock(3, 8, 2, PaddedShortcut)
    nn.init.zeros_(block.bn2.weight)  # the convolutions' branch adds nothing
    assert torch.equal(block(x), expected.relu())


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_initial_weights_are_drawn_from_the_global_generator_with_he_fan_out(name: str) -> None:
    torch.manual_seed(3)
    first = build_model(name, 10)
    torch.manual_seed(3)
    again = build_model(name, 10)
    other = build_model(name, 10)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    for path, module in first.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.03), path
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all()), path
            assert bool((module.bias == 0).all()), path


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "alexnet", "vgg16"])
def test_the_least_image_size_is_the_least_that_runs(name: str) -> None:
    least = MODELS[name].least_image_size
    assert on_meta(name, 10, least, 1)(images(least, 1)).shape == (2, 10)
    with pytest.raises(UserError, match=rf"image_size of model {name} must be .* at least {least}, got {least - 1}$"):
        build_model(name, 10, least - 1)
    with pytest.raises((RuntimeError, ValueError)):
        on_meta(name, 10)(images(least - 1))
