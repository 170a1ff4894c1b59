"""Models are those of their papers: sizes, multiply-adds, names, initial weights."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainables.workloads.models import MODELS, build_model
from trainables.workloads.models.resnet import Block, PaddedShortcut

#: Classes, side in pixels, parameters, multiply-adds in billions: as published (papers; torchvision's tables).
PUBLISHED = {
    "resnet20": (10, 32, 269_722, 0.0408),
    "resnet56": (10, 32, 853_018, 0.1265),
    # The papers' with two projections and their norms in place of padding.
    "resnet20_cifar": (10, 32, 269_722 + 16 * 32 + 64 + 32 * 64 + 128, 0.0408 + 2 * 131_072e-9),
    "resnet56_cifar": (10, 32, 853_018 + 16 * 32 + 64 + 32 * 64 + 128, 0.1265 + 2 * 131_072e-9),
    "resnet18": (1000, 224, 11_689_512, 1.814),
    "resnet50": (1000, 224, 25_557_032, 4.089),
    "alexnet": (1000, 224, 61_100_840, 0.714),
    "vgg16": (1000, 224, 138_357_544, 15.47),
    "efficientnet_lite0": (1000, 224, 4_652_008, 0.385),
}


def on_meta(name: str, classes: int) -> nn.Module:
    """The model without numbers: large ones cost neither time nor memory."""
    with torch.device("meta"):
        return build_model(name, classes)


def images(size: int) -> Tensor:
    return torch.empty(2, 3, size, size, device="meta")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_multiply_adds_are_the_published_ones(name: str) -> None:
    classes, size, parameters, billions = PUBLISHED[name]
    model = on_meta(name, classes)
    assert MODELS[name].classes == classes
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


def test_projections_have_the_names_that_published_schedules_prune() -> None:
    names = dict(on_meta("resnet20_cifar", 10).named_parameters())
    assert {f"layer{stage}.0.downsample.0.weight" for stage in (2, 3)} == {
        name for name in names if name.endswith("downsample.0.weight")
    }


@pytest.mark.parametrize("side", [7, 8])
def test_option_a_is_subsampling_and_zero_channels(side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 8, (side + 1) // 2, (side + 1) // 2)
    for row in range(0, side, 2):
        for column in range(0, side, 2):
            expected[:, :3, row // 2, column // 2] = x[:, :, row, column]
    assert torch.equal(PaddedShortcut(3, 8, stride=2)(x), expected)
    block = Block(3, (8, 8), (3, 3), 2, PaddedShortcut)
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


def test_lite0_pads_as_tensorflow_at_stride_two() -> None:
    """Of an even size, the first output sees the first pixels, and the last one what is beyond the last pixel."""
    for block, kernel, first, last in ((1, 3, 3, 2), (3, 5, 4, 3)):
        layers = build_model("efficientnet_lite0", 10).get_submodule(f"_blocks.{block}")
        nn.init.ones_(layers.get_parameter("_depthwise_conv.weight"))
        x = torch.ones(1, layers.get_submodule("_depthwise_conv").in_channels, 8, 8)
        seen = layers.get_submodule("_depthwise_conv")(layers.get_submodule("_pad")(x))[0, 0]
        assert seen.shape == (4, 4), kernel
        assert seen[0, 0] == first**2
        assert seen[-1, -1] == last**2
