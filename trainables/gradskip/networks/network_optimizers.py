"""One optimizer as several, each with the parameter groups of one network and a step of its own."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainables.errors import UserError


class NetworkOptimizers:
    """Optimizers that are parts of one: its groups, state and learning rates are theirs, and its step calls theirs.

    States are saved and loaded by the whole optimizer, in torch's form, and schedules step it as before.

    Args:
        optimizer: a torch optimizer whose step treats every parameter by itself.
        model: owner of the parameters.
        networks: names of modules of the model; every parameter is in one of them, and every group in one of them.

    Attributes:
        parts: the optimizer of each network, by name.

    Raises:
        UserError: a network that the model does not have, or a group with parameters of several networks or of none.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, networks: Sequence[str]) -> None:
        self._whole = optimizer
        self._places = groups_of_networks(optimizer, model, networks)
        self.parts: dict[str, Optimizer] = {name: _copy(optimizer) for name in networks}
        self._share()
        optimizer.register_load_state_dict_post_hook(lambda _: self._share())
        self._replace_step()

    def _share(self) -> None:
        """Let the parts have the whole optimizer's groups and state, which loading replaces."""
        groups = self._whole.param_groups
        for name, part in self.parts.items():
            part.param_groups = [groups[place] for place in self._places[name]]
            part.state = self._whole.state

    def _replace_step(self) -> None:
        whole, parts = self._whole, self.parts
        inner = whole.step

        @functools.wraps(getattr(inner, "__func__", inner))  # a schedule looks at attributes of the function
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                raise RuntimeError("the optimizer of several networks steps without a closure: call backward() before")
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as a schedule notes a step
            for part in parts.values():
                part.step()

        whole.step = types.MethodType(step, whole)  # type: ignore[method-assign]


def groups_of_networks(optimizer: Optimizer, model: nn.Module, networks: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of each network's parameter groups.

    Raises:
        UserError: a network that the model does not have, or a group with parameters of several networks or of none.
    """
    owner: dict[int, str] = {}
    for network in networks:
        try:
            module = model.get_submodule(network)
        except AttributeError:
            raise UserError(f"network {network!r} must be a module of the model, got none of that name") from None
        owner.update({id(parameter): network for parameter in module.parameters()})
    places: dict[str, list[int]] = {network: [] for network in networks}
    for place, group in enumerate(optimizer.param_groups):
        owners = {owner.get(id(parameter)) for parameter in group["params"]}
        if len(owners) != 1 or None in owners:
            found = " and ".join(sorted(str(each or "no network") for each in owners))
            raise UserError(
                f"each parameter group must be of one of the networks {', '.join(networks)}, got group {place} of "
                f"{found}: give the optimizer one group or more for each"
            )
        places[str(owners.pop())].append(place)
    return places


def _copy(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same attributes, but hooks and a step of its own."""
    found: Optimizer = object.__new__(type(optimizer))
    vars(found).update(vars(optimizer))
    vars(found).pop("step", None)  # a schedule's wrapper around the whole optimizer's
    for name, value in vars(found).items():
        if isinstance(value, OrderedDict):  # hooks
            vars(found)[name] = OrderedDict()
    return found
