"""VGG-16 without batch norm, with torchvision's parameter names and initial weights.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015,
table 1, configuration D; 138,357,544 parameters with 1000 classes.

Shapes: N images of any side of at least 32 pixels; the classifier gets (N, 512, 7, 7) for every side.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from trainables.workloads.models.resnet import he_fan_out

#: Output channels of each stage's 3x3 convolutions; a stage ends by halving the image.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
POOLED_SIZE = 7
HIDDEN = 4096


def vgg16(classes: int, channels: int = 3) -> nn.Sequential:
    """Build VGG-16, which maps (N, channels, S, S) to (N, classes)."""
    features: list[nn.Module] = []
    for stage in STAGES:
        for width in stage:
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(channels * POOLED_SIZE**2, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(HIDDEN, classes),
    )
    model = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            avgpool=nn.AdaptiveAvgPool2d(POOLED_SIZE),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
    he_fan_out(model)
    for layer in classifier:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return model
