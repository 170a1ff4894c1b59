"""A user's own model, ``package.module:function``: imported and called; and what is checked of every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.runtime.isolation import kept_generators
from trainables.workload_options import parameters_of
from trainables.workloads.user_code import import_function


def build_custom(name: str, *, classes: int, image_size: int, channels: int) -> nn.Module:
    """Build the model by calling the user's function as `called_with_sizes`.

    Raises:
        UserError: a name of another form, or as `called_with_sizes`.
    """
    path, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"a model of one's own must be given as package.module:function, got {name!r}")
    return called_with_sizes(name, "model", {"num_classes": classes, "image_size": image_size, "channels": channels})


def called_with_sizes(name: str, what: str, sizes: Mapping[str, int], **always: Any) -> nn.Module:
    """Return the model of the user's function, or class, of this name.

    It is called with those of ``sizes`` that its signature names, with ``num_classes`` where it takes any keyword, and
    with ``always``. Messages call the model by ``what``.

    Raises:
        UserError: a module that does not import, no such function in it, or a function that raises or returns no
            `nn.Module`.
    """
    function = import_function(name, what)
    try:
        named, takes_any = parameters_of(function)
        wanted = {*named, "num_classes"} if takes_any else named
        model = function(**{name: size for name, size in sizes.items() if name in wanted}, **always)
    except Exception as error:
        raise UserError(f"{what} {name} must be built by calling it, which raised {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{what} {name} must return an nn.Module, got {type(model).__name__}")
    return model


def check_scores(name: str, model: nn.Module, classes: int, image_size: int) -> None:
    """Raise UserError unless a model gives scores (2, classes) for two black images; it and generators stay as is."""
    buffers = {buffer: value.clone() for buffer, value in model.named_buffers()}
    shape = (2, 3, image_size, image_size)  # two, since a batch norm over single pixels needs more than one
    try:
        with torch.no_grad(), kept_generators([]):
            scores = torch.func.functional_call(model, buffers, (torch.zeros(shape),))
    except Exception as error:
        raise UserError(
            f"model {name} must take images of shape {shape}, but its forward pass raised {in_one_line(error)}"
        ) from error
    rule = f"model {name} must give scores of shape (2, {classes}) for images of shape {shape}"
    if not isinstance(scores, Tensor):
        raise UserError(f"{rule}, got {type(scores).__name__}")
    if tuple(scores.shape) != (2, classes):
        few = scores.dim() == 2 and len(scores) == 2 and scores.shape[1] < classes
        why = f": it has {scores.shape[1]} outputs, the data has {classes} classes" if few else ""
        raise UserError(f"{rule}, got {tuple(scores.shape)}{why}")


def in_one_line(error: Exception) -> str:
    """Return an exception's type and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())
