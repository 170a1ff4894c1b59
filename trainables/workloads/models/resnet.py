"""Residual networks for ImageNet-like sizes, with torchvision's parameter names and order, and for 32x32 images.

Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. For ImageNet table 1, projections where
the shape changes (option B); a bottleneck that halves the image does so in its 3x3 convolution, as torchvision's does
("v1.5"), where the paper's first 1x1 convolution skips three of four pixels. For 32x32 images section 4.2: 6n + 2
layers in three stages, shortcuts without parameters (option A).

Shapes: N images; C channels; S side in pixels, halved by the first block of each stage but the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

STAGE_WIDTHS = (64, 128, 256, 512)
SMALL_STAGE_WIDTHS = (16, 32, 64)


def he_fan_out(model: nn.Module) -> None:
    """Draw every convolution from a normal distribution of variance 2 / fan-out; biases become 0.

    Draws from torch's global generator. Norms keep torch's initial weight 1 and bias 0.

    Source: He et al., "Delving Deep into Rectifiers", 2015, section 2.2, equation 14 (the backward pass).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def projection(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """Build option B: a 1x1 convolution with batch norm."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
    )


class PaddedShortcut(nn.Module):
    """Option A: every stride-th pixel, and zeros for the channels that the input does not have.

    The paper does not specify the position of the zeros; here they come after the input's channels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.zero_channels = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, C', ceil(S / stride), ceil(S / stride))."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.zero_channels))


Shortcut = Callable[[int, int, int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, shortcut: Shortcut = projection) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.downsample = _where_shapes_differ(shortcut, channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, width, S', S')."""
        y = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, added to the shortcut."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, shortcut: Shortcut = projection) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu3 = nn.ReLU(inplace=True)
        self.downsample = _where_shapes_differ(shortcut, channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, 4 width, S', S')."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        return self.relu3(self.bn3(self.conv3(y)) + self.downsample(x))


def _where_shapes_differ(shortcut: Shortcut, channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return shortcut(channels_in, channels_out, stride)


def resnet18(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-18: two basic blocks per stage; 11,689,512 parameters with 1000 classes."""
    return _large(BasicBlock, (2, 2, 2, 2), classes, channels)


def resnet50(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-50: 3, 4, 6 and 3 bottlenecks; 25,557,032 parameters with 1000 classes."""
    return _large(Bottleneck, (3, 4, 6, 3), classes, channels)


def resnet20(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-20 for 32x32 images: three blocks per stage; 269,722 parameters with 10 classes."""
    return _small(3, classes, channels)


def resnet56(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-56 for 32x32 images: nine blocks per stage; 853,018 parameters with 10 classes."""
    return _small(9, classes, channels)


Block = type[BasicBlock] | type[Bottleneck]


def _large(block: Block, depths: Sequence[int], classes: int, channels: int) -> nn.Sequential:
    stem = nn.Conv2d(channels, STAGE_WIDTHS[0], 7, stride=2, padding=3, bias=False)
    return _resnet(stem, block, STAGE_WIDTHS, depths, classes, projection, maxpool=nn.MaxPool2d(3, stride=2, padding=1))


def _small(depth: int, classes: int, channels: int) -> nn.Sequential:
    stem = nn.Conv2d(channels, SMALL_STAGE_WIDTHS[0], 3, padding=1, bias=False)
    return _resnet(stem, BasicBlock, SMALL_STAGE_WIDTHS, (depth,) * 3, classes, PaddedShortcut)


def _resnet(
    stem: nn.Conv2d, block: Block, widths: Sequence[int], depths: Sequence[int], classes: int, shortcut: Shortcut,
    **pool: nn.Module,
) -> nn.Sequential:  # fmt: skip
    channels_in = stem.out_channels
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=stem, bn1=nn.BatchNorm2d(channels_in), relu=nn.ReLU(inplace=True), **pool
    )
    for number, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
        stage = []
        for place in range(depth):
            stage.append(block(channels_in, width, 2 if number > 1 and place == 0 else 1, shortcut))
            channels_in = width * block.expansion
        layers[f"layer{number}"] = nn.Sequential(*stage)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels_in, classes)
    model = nn.Sequential(layers)
    he_fan_out(model)
    return model
