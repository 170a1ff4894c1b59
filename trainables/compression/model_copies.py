"""Copies of a model for trial computations, and parameter names as the model was built.

A copy shares nothing with the run: no weights, no hooks, no changed classes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.schedule.names import plain_name
from trainables.runtime.isolation import kept_generators
from trainables.workloads.base import Batch

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


def hookless_copy(model: nn.Module, *, meta: bool = False) -> nn.Module:
    """Return a copy without hooks and gradients, so that hooks on the run do not see computations on the copy.

    On the meta device it has shapes but no values.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in vars(module).items():
            if "_hooks" in attribute and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
    for parameter in model.parameters():
        data = parameter.detach()
        data = data.to("meta") if meta else data.clone()
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if meta:
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


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
    devices = {tensor.device for tensor in model.parameters()}
    model.eval()
    try:
        with torch.no_grad(), kept_generators(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Seen(Exception):
    """Raised once the model's inputs are known, to skip the rest of the computation."""


def model_inputs(model: nn.Module, forward: Callable[[nn.Module, Batch], object], batch: Batch) -> tuple[Any, ...]:
    """Return the positional arguments with which a workload's loss calls the model for a batch; nothing is computed.

    Raises:
        ValueError: the model is not called, or with keyword arguments.
    """
    seen: list[tuple[Any, ...]] = []

    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ValueError(f"the model is called with keyword arguments: {', '.join(kwargs)}")
        seen.append(args)
        raise _Seen

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        with evaluating(model):
            forward(model, batch)
    except _Seen:
        return seen[0]
    finally:
        handle.remove()
    raise ValueError("the model is not called")
