"""The direction in which a torch optimizer would step, without a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError

#: Options of parameter groups that choose an implementation, not a direction.
_IMPLEMENTATION: dict[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
#: Optimizers of torch whose steps do not grow with the learning rate in proportion.
_WITHOUT_DIRECTION = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor)
#: Attributes of optimizers that follow real steps: learning rate schedulers replace ``step``, rules listen.
_FOLLOWERS = ("step", "add_param_group", "gradskip")


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

    Raises:
        UserError: the optimizer has no such direction.
    """
    if isinstance(optimizer, _WITHOUT_DIRECTION):
        raise UserError(
            "the optimizer's steps must be proportional to its learning rate, so that they have a direction, got "
            f"{type(optimizer).__name__}: use another, such as SGD or Adam"
        )
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
            state[twin] = {key: _copied(value, parameter) for key, value in optimizer.state.get(parameter, {}).items()}
            kept.append(twin)
        if kept:
            chosen = {key: value for key, value in _IMPLEMENTATION.items() if key in group}
            own = {key: value for key, value in group.items() if key not in ("param_names", "lr")}
            groups.append({**own, **chosen, "params": kept, "lr": 1.0})
    twin_optimizer = _twin(optimizer, groups, {id(parameter): twin for parameter, twin in copies.values()})
    twin_optimizer.state.update({twin: values for twin, values in state.items() if values})
    before = {name: twin.detach().clone() for name, (_, twin) in copies.items()}
    step = type(twin_optimizer).step
    # Without the hooks that torch wraps it in: some follow the steps of all optimizers.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin_optimizer)  # type: ignore[attr-defined]
    return {name: (before[name] - twin.detach()).to(parameter.dtype) for name, (parameter, twin) in copies.items()}


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]], twins: dict[int, Any]) -> Optimizer:
    """Return an optimizer of the same class and attributes for other parameters, without state, hooks and followers."""
    twin = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in (*_FOLLOWERS, "state", "param_groups") and not name.startswith("_optimizer_"):
            try:
                twin.__dict__[name] = copy.deepcopy(value, dict(twins))
            except Exception:  # noqa: BLE001  # what cannot be copied (a lock, a file) is no part of a direction
                twin.__dict__[name] = value
    twin.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    return twin


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _copied(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    # Counters and products of coefficients are rounded as in the real step.
    return (_double(value) if value.dim() or value.shape == parameter.shape else value).clone()
