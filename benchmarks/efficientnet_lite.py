"""EfficientNet-Lite0 with the names of TensorFlow's weights as PyTorch ports have them, for `fine_tuning.py`.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, without
squeeze-and-excitation, with ReLU6, and stem and head of fixed width. Norms have TensorFlow's constants, and
convolutions of stride 2 its padding, which for images of an even size is one less before than after them. Of
`fine_tuning.py`'s test, a linear probe has .653 right so, .542 with symmetric padding (the best of three penalties).

Shapes: B images (B, 3, H, W), H and W multiples of 32, (pixel - 127) / 128; scores (B, classes).
"""

from __future__ import annotations

from collections.abc import Mapping

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
#: What the modules are called in files of weights, outside and inside of blocks.
OUTSIDE = {"_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv", "_bn1": "head.norm"}
INSIDE = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}


class ConvNorm(nn.Sequential):
    """Padding, a convolution, its norm and, except for a projection, ReLU6."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, *, relu: bool = True):
        super().__init__()
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        if before != after:
            self.pad = nn.ZeroPad2d((before, after, before, after))
            before = 0
        self.conv = nn.Conv2d(inside, outside, kernel, stride, padding=before, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outside, eps=1e-3, momentum=0.01)
        if relu:
            self.relu = nn.ReLU6(inplace=True)


class Block(nn.Module):
    """Inverted residual: expansion, a convolution of each channel, projection; a shortcut where the shape stays."""

    def __init__(self, inside: int, outside: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        wide = inside * expansion
        self.expand = ConvNorm(inside, wide, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(wide, wide, kernel, stride, groups=wide)
        self.project = ConvNorm(wide, outside, 1, relu=False)
        self.shortcut = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H / stride, W / stride)."""
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.shortcut else y


class EfficientNetLite0(nn.Module):
    """Stem, 16 blocks, head, average, dropout, classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, STEM, 3, 2)
        self.blocks = nn.ModuleList()
        inside = STEM
        for expansion, outside, repeats, stride, kernel in STAGES:
            for number in range(repeats):
                self.blocks.append(Block(inside, outside, expansion, stride if number == 0 else 1, kernel))
                inside = outside
        self.head = ConvNorm(inside, HEAD, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(HEAD, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.classifier(self.dropout(self.pool(self.head(x)).flatten(1)))
        return scores

    def load_features(self, weights: Mapping[str, Tensor]) -> None:
        """Take all weights of a file, whose names must be ours, except the classifier's."""
        features = {renamed(name): weight for name, weight in weights.items() if not name.startswith("_fc.")}
        own = {f"classifier.{name}": value for name, value in self.classifier.state_dict().items()}
        self.load_state_dict({**features, **own})


def renamed(name: str) -> str:
    """Return our name of a tensor.

    >>> renamed("_blocks.3._bn1.running_var")
    'blocks.3.depthwise.norm.running_var'
    """
    *block, module, tensor = name.split(".")
    return ".".join(("blocks", block[1], INSIDE[module], tensor) if block else (OUTSIDE[module], tensor))
