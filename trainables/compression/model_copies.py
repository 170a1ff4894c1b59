"""Copies of a model for trial computations, and parameter names as the model was built.

A copy shares nothing with the run: no weights, no hooks, no changed classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.schedule.names import plain_name
from trainables.runtime.isolation import kept_generators
from trainables.runtime.model_copy import copy_of

_PREFIX, _ORIGINAL = "parametrizations.", "original"


def as_built(name: str) -> str:
    """Return a parameter's name without parametrization and without a leading ``module.``.

    >>> as_built("module.layer1.0.conv1.parametrizations.weight.original")
    'layer1.0.conv1.weight'
    """
    owner, _, last = plain_name(name).rpartition(".")
    head, found, tensor = owner.rpartition(_PREFIX)
    return head + tensor if found and last == _ORIGINAL else plain_name(name)


def float_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's tensor without its parametrization; None if there is none, or several originals."""
    if parametrize.is_parametrized(module, name):
        return getattr(module.parametrizations[name], _ORIGINAL, None)  # type: ignore[index]
    found: Tensor | None = getattr(module, name, None)
    return found


def hookless_copy(model: nn.Module) -> nn.Module:
    """Return a copy without hooks and gradients, so that hooks on the run do not see computations on the copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in vars(module).items():
            if "_hooks" in attribute and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    return copy_of(model, memo)


def bare_copy(model: nn.Module) -> nn.Module:
    """Return a copy without hooks and parametrizations, whose parameters are the original float weights.

    `torch.nn.utils.parametrize.remove_parametrizations` would change the class that a copy shares with its model.
    """
    found = hookless_copy(model)
    for module in list(found.modules()):
        if not parametrize.is_parametrized(module):
            continue
        lists = dict(module.parametrizations.items())  # type: ignore[union-attr, operator]
        originals = {name: getattr(behind, _ORIGINAL, None) for name, behind in lists.items()}
        if any(original is None for original in originals.values()):
            continue  # computed from several tensors, such as a weight norm: not changed
        del module._modules["parametrizations"]
        module.__class__ = type(module).__mro__[1]
        for name, original in originals.items():
            if isinstance(original, nn.Parameter):
                module.register_parameter(name, original)
            else:
                module.register_buffer(name, original)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the context in eval mode without gradients; afterwards restore all modules' modes and the generators."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), kept_generators(parameter.device for parameter in model.parameters()):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
