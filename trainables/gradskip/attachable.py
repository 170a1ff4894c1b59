"""Checks that refuse optimizers and settings that do not work with Gradient-Skip, before anything is attached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import RULES


def check_attachable(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer whose step Gradient-Skip cannot surround."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "Gradient-Skip needs an optimizer that leaves parameters without gradient alone, got LBFGS, which "
            "moves all parameters together: use SGD, Adam, AdamW or another first-order one"
        )
    if hasattr(optimizer, "gradskip"):
        raise UserError("this optimizer has Gradient-Skip already: wrap it once")
    inner = _inner_optimizer(optimizer)
    if inner is not None:
        raise UserError(
            f"Gradient-Skip needs the optimizer that moves the parameters, got {type(optimizer).__name__} around "
            f"{type(inner).__name__}: wrap the inner one first, as in {type(optimizer).__name__}(gradskip.wrap(...))"
        )
    try:
        optimizer.register_state_dict_pre_hook(lambda _: None).remove()
    except AttributeError:
        raise UserError(
            f"Gradient-Skip needs an optimizer with torch's hooks, got {type(optimizer).__name__}, which does not call "
            "torch.optim.Optimizer.__init__: have it call that, or wrap the optimizer that it is built around"
        ) from None


def _inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that this one is built around, such as that of Lookahead or of accelerate."""
    held: list[Any] = []
    for value in vars(optimizer).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return next((value for value in held if isinstance(value, Optimizer) and value is not optimizer), None)


def check_model(settings: Settings, model: nn.Module | None, optimizer: Optimizer) -> None:
    """Raise UserError for settings that need a model where none is given, or an unsharded one where it is sharded."""
    for field, wanted in (
        ("norm_statistics", settings.norm_statistics == "hold"),
        ("prefix_autograd", not settings.prefix_autograd),
        ("rule", settings.mode == "plasticity"),
    ):
        if wanted and model is None:
            value = getattr(settings, field)
            text = int(value) if isinstance(value, bool) else value
            raise UserError(f"CAC_{field.upper()}={text} looks into the model: give model=")
    if settings.mode == "plasticity" and any(
        hasattr(p, "full_tensor") for group in optimizer.param_groups for p in group["params"]
    ):
        raise UserError(
            "CAC_RULE must not be plasticity for a sharded model (fully_shard), whose weights no copy can stand in "
            f"for: use one of {', '.join(rule for rule in RULES if rule != 'plasticity')}"
        )
