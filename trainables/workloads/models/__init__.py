"""Image classifiers by name, and the user's own models. Loads torch only when a model is built.

Parameter names are those of published checkpoints and compression schedules for these models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from trainables.errors import UserError, unknown_name

if TYPE_CHECKING:
    from torch import nn


class Entry(NamedTuple):
    """A built-in model."""

    module: str
    """Module of this package with a function of the model's name, called with the numbers of classes and channels."""
    classes: int
    """Number of classes as published."""


MODELS: dict[str, Entry] = {
    "resnet20": Entry("resnet", 10),
    "resnet56": Entry("resnet", 10),
    "resnet20_cifar": Entry("resnet", 10),
    "resnet56_cifar": Entry("resnet", 10),
    "resnet18": Entry("resnet", 1000),
    "resnet50": Entry("resnet", 1000),
    "alexnet": Entry("alexnet_vgg", 1000),
    "vgg16": Entry("alexnet_vgg", 1000),
    "efficientnet_lite0": Entry("efficientnet", 1000),
}


def build_model(name: str, classes: int, image_size: int = 224, channels: int = 3) -> nn.Module:
    """Build a model that maps images (N, channels, S, S) to scores (N, classes), weights from torch's global generator.

    Args:
        name: a name of `MODELS`, or ``package.module:function`` for a user's own model, see `custom.build_custom`.
        classes: number of outputs, >= 1.
        image_size: S in pixels, for a user's own model.
        channels: channels of the images, >= 1.

    Raises:
        UserError: an unknown name, no class, or a user's own model that cannot be built.
    """
    if classes < 1:
        raise UserError(f"classes of model {name} must be an integer of at least 1, got {classes}")
    if ":" in name:
        from trainables.workloads.models.custom import build_custom

        return build_custom(name, classes=classes, image_size=image_size, channels=channels)
    if name not in MODELS:
        raise unknown_name(
            "model", name, [*MODELS, "package.module:function", "transformers:NAME", "timm:NAME", "torchvision:NAME"]
        )
    module = importlib.import_module(f"{__name__}.{MODELS[name].module}")
    model: nn.Module = getattr(module, name)(classes, channels)
    return model
