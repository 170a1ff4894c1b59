"""The direction in which a torch optimizer would step, without a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: Options of parameter groups that choose an implementation, not a direction.
_IMPLEMENTATION: dict[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def step_direction(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the direction d of the step that the optimizer would take with these gradients: p becomes p - lr d.

    It is that of the optimizer's own `step`, executed on copies in double precision with a learning rate of 1: with
    momentum the buffer after the step, with Adam the quotient of its moments, weight decay included.

    Args:
        optimizer: any torch optimizer whose steps are proportional to the learning rate; nothing of it is changed.
        parameters: by name, in the optimizer's groups.
        gradients: by name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups, copies, state = [], {}, {}
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or name not in gradients:
                continue
            twin = nn.Parameter(_double(parameter.detach()).clone())
            twin.grad = _double(gradients[name]).clone()
            copies[name] = (parameter, twin)
            state[twin] = {key: _copied(value) for key, value in optimizer.state.get(parameter, {}).items()}
            kept.append(twin)
        if kept:
            chosen = {key: value for key, value in _IMPLEMENTATION.items() if key in group}
            own = {key: value for key, value in group.items() if key not in ("param_names", "lr")}
            groups.append({**own, **chosen, "params": kept, "lr": 1.0})
    twin_optimizer = _twin(optimizer, groups)
    for parameter, values in state.items():
        if values:
            twin_optimizer.state[parameter] = values
    before = {name: twin.detach().clone() for name, (_, twin) in copies.items()}
    twin_optimizer.step()
    return {name: (before[name] - twin.detach()).to(parameter.dtype) for name, (parameter, twin) in copies.items()}


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same rule for other parameters; a subclass of torch's steps as torch's does."""
    kind = next((k for k in type(optimizer).__mro__ if k.__module__.startswith("torch.optim.")), Optimizer)
    if kind is not Optimizer:
        return kind(groups)
    twin = copy.copy(optimizer)  # an optimizer of the user's own
    twin.param_groups = groups
    twin.state = type(optimizer.state)(optimizer.state.default_factory)
    return twin


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _copied(value: Any) -> Any:
    return _double(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.stack(torch._foreach_norm(list(gradients.values()))).norm()
