"""Chains of convolutions before a large classifier, with torchvision's parameter names and initial weights.

Shapes: N images of any side (of at least 63 pixels for AlexNet, 32 for VGG-16); the classifier gets (N, C, P, P) for
every side.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from trainables.workloads.models.resnet import he_fan_out

HIDDEN = 4096
#: Output channels of each VGG stage's 3x3 convolutions; a stage ends by halving the image.
VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def alexnet(classes: int, channels: int = 3) -> nn.Sequential:
    """Build AlexNet with one tower; 61,100,840 parameters with 1000 classes.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5.
    """
    features: list[nn.Module] = [nn.Conv2d(channels, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True)]
    features += [nn.MaxPool2d(3, stride=2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True)]
    features.append(nn.MaxPool2d(3, stride=2))
    for inputs, outputs in ((192, 384), (384, 256), (256, 256)):
        features += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
    features.append(nn.MaxPool2d(3, stride=2))
    classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(256 * 6**2, HIDDEN), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, classes),
    )  # fmt: skip
    return _chain(features, 6, classifier)


def vgg16(classes: int, channels: int = 3) -> nn.Sequential:
    """Build VGG-16 without batch norm; 138,357,544 parameters with 1000 classes.

    Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015,
    table 1, configuration D.
    """
    features: list[nn.Module] = []
    for stage in VGG_STAGES:
        for width in stage:
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(channels * 7**2, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(HIDDEN, classes),
    )  # fmt: skip
    model = _chain(features, 7, classifier)
    he_fan_out(model)
    for layer in classifier:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return model


def _chain(features: list[nn.Module], pooled_size: int, classifier: nn.Module) -> nn.Sequential:
    pool = nn.AdaptiveAvgPool2d(pooled_size)
    parts = OrderedDict(
        features=nn.Sequential(*features), avgpool=pool, flatten=nn.Flatten(), classifier=classifier
    )  # fmt: skip
    return nn.Sequential(parts)
