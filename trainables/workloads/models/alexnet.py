"""AlexNet with one tower, with torchvision's parameter names and initial weights (torch's defaults).

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5 (the one-tower
variant); 61,100,840 parameters with 1000 classes.

Shapes: N images of any side of at least 63 pixels; the classifier gets (N, 256, 6, 6) for every side.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

POOLED_SIZE = 6
HIDDEN = 4096


def alexnet(classes: int, channels: int = 3) -> nn.Sequential:
    """Build AlexNet, which maps (N, channels, S, S) to (N, classes)."""
    features = nn.Sequential(
        nn.Conv2d(channels, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
    )
    classifier = nn.Sequential(
        nn.Dropout(),
        nn.Linear(256 * POOLED_SIZE**2, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, classes),
    )
    return nn.Sequential(
        OrderedDict(
            features=features,
            avgpool=nn.AdaptiveAvgPool2d(POOLED_SIZE),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
