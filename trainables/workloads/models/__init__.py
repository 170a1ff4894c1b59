"""Image classifiers by name, and the user's own models. Loads torch only when a model is built.

Parameter names are those of published checkpoints and compression schedules for these models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from trainables.errors import UserError, unknown_name

if TYPE_CHECKING:
    from torch import nn

#: Width and height at which a user's own model is tried unless a size is given.
DEFAULT_IMAGE_SIZE = 224


class Entry(NamedTuple):
    """A built-in model."""

    module: str
    """Module of this package with a function of the model's name, called with the numbers of classes and channels."""
    image_size: int
    """Width and height of the images for which it was published, in pixels."""
    least_image_size: int
    """Smallest width and height that leave at least one pixel for its last layer, in pixels."""
    description: str


MODELS: dict[str, Entry] = {
    "resnet20": Entry("resnet", 32, 1, "ResNet-20 for 32x32 images, 0.27 M parameters (He et al. 2016, section 4.2)"),
    "resnet56": Entry("resnet", 32, 1, "ResNet-56 for 32x32 images, 0.85 M parameters (He et al. 2016, section 4.2)"),
    "resnet18": Entry("resnet", 224, 1, "ResNet-18, 11.7 M parameters (He et al. 2016, table 1)"),
    "resnet50": Entry(
        "resnet", 224, 1,
        "ResNet-50, 25.6 M parameters (He et al. 2016, table 1; strides in the 3x3 convolutions: v1.5)",
    ),
    "alexnet": Entry("alexnet_vgg", 224, 63, "AlexNet with one tower, 61.1 M parameters (Krizhevsky 2014)"),
    "vgg16": Entry(
        "alexnet_vgg", 224, 32,
        "VGG-16 without batch norm, 138.4 M parameters (Simonyan and Zisserman 2015, configuration D)",
    ),
}  # fmt: skip


def build_model(name: str, classes: int, image_size: int | None = None, channels: int = 3) -> nn.Module:
    """Build a model that maps images (N, channels, S, S) to scores (N, classes), weights from torch's global generator.

    Args:
        name: a name of `MODELS`, or ``package.module:function`` for a user's own model, see `custom.build_custom`.
        classes: number of outputs, >= 1.
        image_size: S in pixels, >= 1. None: the size for which the model was published, or 224 for a user's own.
        channels: channels of the images, >= 1.

    Raises:
        UserError: an unknown name, a number out of range, images too small for the model, or a user's own model that
            cannot be built or does not fit the data.
    """
    name = str(name)
    own = ":" in name
    if not own and name not in MODELS:
        raise unknown_name("model", name, [*MODELS, "package.module:function"])
    if image_size is None:
        image_size = DEFAULT_IMAGE_SIZE if own else MODELS[name].image_size
    least = 1 if own else MODELS[name].least_image_size
    for what, value, bound in (("classes", classes, 1), ("channels", channels, 1), ("image_size", image_size, least)):
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise UserError(f"{what} of model {name} must be an integer of at least {bound}, got {value!r}")
    if own:
        from trainables.workloads.models.custom import build_custom

        return build_custom(name, classes=classes, image_size=image_size, channels=channels)
    module = importlib.import_module(f"{__name__}.{MODELS[name].module}")
    model: nn.Module = getattr(module, name)(classes, channels)
    return model
