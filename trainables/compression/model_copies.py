"""Copies of a model to try something on, and names of parameters as the model was built.

A copy shares nothing with the run: no weights, no hooks, no classes that are changed.
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
from trainables.runtime.generators import kept_generators
from trainables.workloads.base import Batch

_PREFIX, _ORIGINAL = "parametrizations.", "original"


def as_built(name: str) -> str:
    """A parameter's name before a quantizer parametrized it, without a leading ``module.``.

    >>> as_built("module.layer1.0.conv1.parametrizations.weight.original")
    'layer1.0.conv1.weight'
    """
    owner, _, last = plain_name(name).rpartition(".")
    head, found, tensor = owner.rpartition(_PREFIX)
    return head + tensor if found and last == _ORIGINAL else plain_name(name)


def float_tensor(module: nn.Module, name: str) -> Tensor | None:
    """A module's tensor, behind its parametrization if it has one; None where there is none, or several behind it."""
    if parametrize.is_parametrized(module, name):
        return getattr(module.parametrizations[name], _ORIGINAL, None)  # type: ignore[index]
    found: Tensor | None = getattr(module, name, None)
    return found


def hookless_copy(model: nn.Module, *, meta: bool = False) -> nn.Module:
    """A copy without hooks and gradients: what watches the run does not see what is tried on it.

    Args:
        model: any; left alone.
        meta: make the copy on the meta device, which has shapes and no numbers.
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
    """A copy without hooks and without parametrizations: its parameters are the float weights behind them.

    `torch.nn.utils.parametrize.remove_parametrizations` would change the class that a copy shares with its model.
    """
    found = hookless_copy(model)
    for module in list(found.modules()):
        if not parametrize.is_parametrized(module):
            continue
        lists = dict(module.parametrizations.items())  # type: ignore[union-attr, operator]
        originals = {name: getattr(behind, _ORIGINAL, None) for name, behind in lists.items()}
        if any(original is None for original in originals.values()):
            continue  # made of several tensors, such as a weight norm: stays as it is
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
    """Eval mode and no gradients inside; every module's mode, and the generators, as before afterwards."""
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
    """The model's inputs are known; nothing more is to be computed."""


def model_inputs(model: nn.Module, forward: Callable[[nn.Module, Batch], object], batch: Batch) -> tuple[Any, ...]:
    """What a workload's loss calls the model with: its positional arguments for a batch.

    Args:
        model: left alone; not computed.
        forward: (model, batch) to anything, such as `Workload.loss`.
        batch: on the model's device.

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
