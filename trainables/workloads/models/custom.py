"""A user's own model, ``package.module:function``: imported, called, and tried on a batch of two images.

Shapes: images (2, channels, S, S) float32; scores (2, classes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.workload_options import parameters_of
from trainables.workloads.user_code import import_function

#: Two, since a batch norm over single pixels needs more than one sample in training mode.
TRIED_IMAGES = 2


def build_custom(name: str, *, classes: int, image_size: int, channels: int) -> nn.Module:
    """Build the model by calling the user's function.

    The function is called with those of ``num_classes``, ``image_size`` and ``channels`` that its signature names, and
    with ``num_classes`` where it takes any keyword. A class works as well.

    Raises:
        UserError: a name of another form, a module that does not import, no such function in it, a function that
            raises or returns no `nn.Module`, or a model that gives anything but (2, classes) for two images.
    """
    path, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"a model of one's own must be given as package.module:function, got {name!r}")
    function = import_function(name, "model")
    sizes = {"num_classes": classes, "image_size": image_size, "channels": channels}
    try:
        named, takes_any = parameters_of(function)
        wanted = {*named, "num_classes"} if takes_any else named
        model = function(**{name: size for name, size in sizes.items() if name in wanted})
    except Exception as error:
        raise UserError(f"model {name} must be built by calling it, which raised {_in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name} must return an nn.Module, got {type(model).__name__}")
    _check_scores(name, model, classes, (TRIED_IMAGES, channels, image_size, image_size))
    return model


def _check_scores(name: str, model: nn.Module, classes: int, shape: tuple[int, ...]) -> None:
    buffers = {buffer: value.clone() for buffer, value in model.named_buffers()}  # the model's own stay as they are
    try:
        with torch.no_grad(), kept_generators([]):
            scores = torch.func.functional_call(model, buffers, (torch.zeros(shape),))
    except Exception as error:
        raise UserError(
            f"model {name} must take images of shape {shape}, but its forward pass raised {_in_one_line(error)}"
        ) from error
    rule = f"model {name} must give scores of shape ({shape[0]}, {classes}) for images of shape {shape}"
    if not isinstance(scores, Tensor):
        raise UserError(f"{rule}, got {type(scores).__name__}")
    if tuple(scores.shape) != (shape[0], classes):
        few = scores.dim() == 2 and len(scores) == shape[0] and scores.shape[1] < classes
        why = f": it has {scores.shape[1]} outputs, the data has {classes} classes" if few else ""
        raise UserError(f"{rule}, got {tuple(scores.shape)}{why}")


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
