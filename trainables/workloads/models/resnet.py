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


class Block(nn.Module):
    """Convolutions with batch norm, a ReLU between them, added to the shortcut.

    Args:
        channels_in: channels of the input.
        widths: output channels of each convolution.
        kernels: side of each convolution, odd.
        stride: of the first 3x3 convolution.
        shortcut: (channels_in, channels_out, stride) -> the module beside them where the shape changes.
    """

    def __init__(
        self, channels_in: int, widths: Sequence[int], kernels: Sequence[int], stride: int, shortcut: Shortcut
    ) -> None:
        super().__init__()
        self._convolutions, inside = len(widths), channels_in
        for number, (width, kernel) in enumerate(zip(widths, kernels, strict=True), start=1):
            by = stride if kernels.index(3) == number - 1 else 1
            self.add_module(f"conv{number}", nn.Conv2d(inside, width, kernel, by, padding=kernel // 2, bias=False))
            self.add_module(f"bn{number}", nn.BatchNorm2d(width))
            self.add_module(f"relu{number}", nn.ReLU(inplace=True))
            inside = width
        same = stride == 1 and channels_in == inside
        self.downsample = nn.Identity() if same else shortcut(channels_in, inside, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, S, S) to (N, C', S', S')."""
        y = x
        for number in range(1, self._convolutions + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            y = getattr(self, f"relu{number}")(y if number < self._convolutions else y + self.downsample(x))
        return y


def resnet18(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-18: two basic blocks per stage; 11,689,512 parameters with 1000 classes."""
    return _large((3, 3), 1, (2, 2, 2, 2), classes, channels)


def resnet50(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-50: 3, 4, 6 and 3 bottlenecks; 25,557,032 parameters with 1000 classes."""
    return _large((1, 3, 1), 4, (3, 4, 6, 3), classes, channels)


def resnet20(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-20 for 32x32 images: three blocks per stage; 269,722 parameters with 10 classes."""
    return _small(3, classes, channels)


def resnet20_cifar(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-20 with projections, as Distiller's schedules of that name want it."""
    return _small(3, classes, channels, projection)


def resnet56(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-56 for 32x32 images: nine blocks per stage; 853,018 parameters with 10 classes."""
    return _small(9, classes, channels)


def resnet56_cifar(classes: int, channels: int = 3) -> nn.Sequential:
    """Build ResNet-56 with projections, as Distiller's schedules of that name want it."""
    return _small(9, classes, channels, projection)


def _large(kernels: Sequence[int], expansion: int, depths: Sequence[int], classes: int, channels: int) -> nn.Sequential:
    stem = nn.Conv2d(channels, STAGE_WIDTHS[0], 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return _resnet(stem, kernels, expansion, STAGE_WIDTHS, depths, classes, projection, maxpool=pool)


def _small(depth: int, classes: int, channels: int, shortcut: Shortcut = PaddedShortcut) -> nn.Sequential:
    stem = nn.Conv2d(channels, SMALL_STAGE_WIDTHS[0], 3, padding=1, bias=False)
    return _resnet(stem, (3, 3), 1, SMALL_STAGE_WIDTHS, (depth,) * 3, classes, shortcut)


def _resnet(
    stem: nn.Module, kernels: Sequence[int], expansion: int, widths: Sequence[int], depths: Sequence[int],
    classes: int, shortcut: Shortcut, **pool: nn.Module,
) -> nn.Sequential:  # fmt: skip
    inside = widths[0]
    layers: dict[str, nn.Module] = {"conv1": stem, "bn1": nn.BatchNorm2d(inside), "relu": nn.ReLU(inplace=True), **pool}
    for number, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
        stage = []
        for place in range(depth):
            outputs = (*[width] * (len(kernels) - 1), width * expansion)
            stage.append(Block(inside, outputs, kernels, 2 if number > 1 and place == 0 else 1, shortcut))
            inside = width * expansion
        layers[f"layer{number}"] = nn.Sequential(*stage)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inside, classes)}
    model = nn.Sequential(OrderedDict(layers))
    he_fan_out(model)
    return model
