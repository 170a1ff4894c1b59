"""Residual networks for 32x32 images.

Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2: 6n + 2 layers in three
stages of 16, 32 and 64 channels, shortcuts without parameters (option A).

Shapes: N images; C channels; S side in pixels, halved by the first block of the second and of the third stage.
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from trainables.workloads.models.resnet import he_fan_out

STAGE_CHANNELS = (16, 32, 64)


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


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = PaddedShortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, C', S', S')."""
        y = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet20(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-20: three blocks per stage; 269,722 parameters with 10 classes."""
    return _resnet(3, classes, channels)


def resnet56(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-56: nine blocks per stage; 853,018 parameters with 10 classes."""
    return _resnet(9, classes, channels)


def _resnet(blocks: int, classes: int, channels: int) -> nn.Sequential:
    """Build a residual network that maps (N, channels, S, S) to (N, classes)."""
    width = STAGE_CHANNELS[0]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, width, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
    )
    for number, wider in enumerate(STAGE_CHANNELS, start=1):
        first = Block(width, wider, stride=1 if number == 1 else 2)
        layers[f"layer{number}"] = nn.Sequential(first, *(Block(wider, wider, stride=1) for _ in range(blocks - 1)))
        width = wider
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(width, classes)
    model = nn.Sequential(layers)
    he_fan_out(model)
    return model
