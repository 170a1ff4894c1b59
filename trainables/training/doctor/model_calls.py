"""Arguments of a model's forward pass: as a training step gives them, or as a batch suggests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from trainables.errors import UserError


@dataclass(frozen=True)
class ModelCall:
    """Arguments of one forward pass."""

    positional: tuple[Any, ...] = ()
    """Arguments by position."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name."""

    def __call__(self, model: nn.Module) -> Any:
        """Return what a model gives for these arguments."""
        return model(*self.positional, **self.keywords)

    def detached(self, device: torch.device | None = None) -> ModelCall:
        """Return the same arguments outside the graph that they came from, on a device if one is given."""

        def moved(value: Any) -> Any:
            return value.detach().to(device) if isinstance(value, Tensor) else value

        return ModelCall(*tree_map(moved, (self.positional, dict(self.keywords))))


def call_from_batch(model: nn.Module, batch: Any) -> ModelCall:
    """Return the call that a batch suggests.

    The values of a mapping go to the arguments of the same names, as models of Hugging Face take them; of a sequence,
    the first ones go to the arguments without defaults. Otherwise the first tensor is the model's input.

    Raises:
        UserError: the batch has no tensor.
    """
    if isinstance(batch, Tensor):
        return ModelCall((batch,))
    taken = inspect.signature(model.forward).parameters
    needed = [name for name, one in taken.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if isinstance(batch, Mapping):
        named = {name: value for name, value in batch.items() if name in taken}
        if named and named.keys() >= set(needed):
            return ModelCall(keywords=named)
        values = list(batch.values())
    else:
        values = list(batch) if isinstance(batch, (tuple, list)) else []
        first = values[: len(needed)]
        if len(needed) > 1 and len(first) == len(needed) and all(isinstance(value, Tensor) for value in first):
            return ModelCall(tuple(first))
    if not values:
        raise UserError("the doctor needs batches with a tensor, got one without")
    return call_from_batch(model, values[0])


class NetworkCalls:
    """The networks that are called with gradients, each with the arguments of its latest call.

    Parts that a recorded network calls are no networks of their own.
    """

    def __init__(self) -> None:
        self._calls: dict[nn.Module, ModelCall] = {}
        self._depth = 0
        self.trains = True
        """Whether the latest network that was called was in training mode; True before the first call."""

    @contextmanager
    def recorded(self) -> Iterator[NetworkCalls]:
        """Record the calls inside the context."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @property
    def by_network(self) -> dict[nn.Module, ModelCall]:
        """Return the recorded calls, without networks that are parts of another recorded one."""
        parts = {part for network in self._calls for part in network.modules() if part is not network}
        return {network: call for network, call in self._calls.items() if network not in parts}

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        self._depth -= 1
        if self._depth or not any(True for _ in module.parameters()):  # a loss is no network
            return
        self.trains = module.training
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._calls[module] = ModelCall(positional, keywords).detached()
