"""One forward pass watched: in which order layers execute, and which parameters lie upstream of which.

The order in which a model registers its layers need not be that in which they run, and what a stop saves depends on
what still trains before it. Both are read off the autograd graph of a single training batch.

Sets of parameters are bit masks: bit n stands for parameter n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.training.generators import kept_generators


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """What one forward pass showed, by parameter number."""

    ranks: tuple[int, ...]
    """When the module that owns the parameter was called first, from 0; ascending in execution order."""
    upstream: tuple[int, ...]
    """Mask of the parameters that the owner's input depends on: their gradients come through the owner."""
    before: Mapping[str, int] = field(default_factory=dict)
    """The same mask by the name of a module, for every module that was called."""

    def state_dict(self) -> dict[str, Any]:
        """Plain types; masks as hexadecimal text, for they have a bit a parameter."""
        return {
            "ranks": list(self.ranks),
            "upstream": [hex(mask) for mask in self.upstream],
            "before": {name: hex(mask) for name, mask in self.before.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ModelTrace:
        """The trace that `state_dict` gave."""
        return cls(
            ranks=tuple(state["ranks"]),
            upstream=tuple(int(mask, 16) for mask in state["upstream"]),
            before={name: int(mask, 16) for name, mask in state["before"].items()},
        )

    def left_upstream(self, stopped: set[int]) -> set[int]:
        """Numbers of parameters outside ``stopped`` whose gradients pass through a stopped layer."""
        mask = 0
        for number in stopped:
            mask |= self.upstream[number]
        return numbers_of(mask) - stopped


def numbers_of(mask: int) -> set[int]:
    """The numbers in a mask.

    >>> sorted(numbers_of(0b1010))
    [1, 3]
    """
    return {n for n in range(mask.bit_length()) if mask >> n & 1}


def trace_model(model: nn.Module, parameters: Sequence[Tensor], forward: Callable[[nn.Module], Any]) -> ModelTrace:
    """Run ``forward(model)`` once and watch; weights, buffers, gradients, flags and generators stay as they are.

    A layer whose parent uses its weights without calling it (attention's output projection) has its parent's place.
    """
    number_of = {id(p): number for number, p in enumerate(parameters)}
    masks = _GraphMasks(number_of)
    calls: dict[int, tuple[int, int]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        mask = masks.of((args, kwargs))
        rank, known = calls.get(id(module), (len(calls), 0))
        calls[id(module)] = (rank, known | mask)

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    try:
        with _untouched(model, parameters), torch.enable_grad():
            forward(model)
    finally:
        for handle in handles:
            handle.remove()
    ranks = [len(calls)] * len(parameters)  # a parameter that no module owns stops last
    upstream = [0] * len(parameters)
    for module, place in _with_callers(model, calls):
        for parameter in module._parameters.values():
            number = None if parameter is None else number_of.get(id(parameter))
            if number is not None:
                ranks[number] = min(ranks[number], place[0])
                upstream[number] |= place[1] & ~(1 << number)
    before_modules = {name: calls[id(m)][1] for name, m in model.named_modules() if id(m) in calls}
    return ModelTrace(ranks=tuple(ranks), upstream=tuple(upstream), before=before_modules)


def _with_callers(
    module: nn.Module, calls: dict[int, tuple[int, int]], above: tuple[int, int] = (0, 0)
) -> Iterator[tuple[nn.Module, tuple[int, int]]]:
    place = calls.get(id(module), above)
    yield module, place
    for child in module.children():
        yield from _with_callers(child, calls, place)


class _GraphMasks:
    """Which parameters a tensor's graph reaches, remembered node by node."""

    def __init__(self, number_of: dict[int, int]) -> None:
        self._number_of = number_of
        self._masks: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                return self._of_node(value.grad_fn)
            return self._of_leaf(value)
        if isinstance(value, dict):
            value = list(value.values())
        mask = 0
        if isinstance(value, (tuple, list)):
            for part in value:
                mask |= self.of(part)
        return mask

    def _of_leaf(self, leaf: Any) -> int:
        number = self._number_of.get(id(leaf))
        return 0 if number is None else 1 << number

    def _of_node(self, root: Any) -> int:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self._masks:
                stack.pop()
                continue
            before = [n for n, _ in node.next_functions if n is not None]
            pending = [n for n in before if n not in self._masks]
            if pending:
                stack.extend(pending)
                continue
            mask = self._of_leaf(getattr(node, "variable", None))
            for earlier in before:
                mask |= self._masks[earlier]
            self._masks[node] = mask
            stack.pop()
        return self._masks[root]


@contextmanager
def _untouched(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[None]:
    """All parameters need a gradient inside; flags, buffers and random generators are put back."""
    flags = [p.requires_grad for p in parameters]
    buffers = [
        (m, name, b, b.detach().clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    try:
        with kept_generators(p.device for p in parameters):
            for parameter in parameters:
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
            yield
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # a forward pass may have put another one in its place
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def copied(value: Any) -> Any:
    """The value with its tensors cloned, so that a model that changes its inputs in place changes a copy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copied(part) for part in value)
    return value


class ForwardHook:
    """A forward pre-hook that hands a training step's inputs on. Copies of the model carry an inert one."""

    def __init__(self, seen: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._seen = seen
        self._handles: list[RemovableHandle] = []

    def watch(self, *modules: nn.Module) -> None:
        """Hook these modules; the first of them to be called hands its inputs on."""
        self._handles += [m.register_forward_pre_hook(self, with_kwargs=True) for m in modules]

    def remove(self) -> None:
        """Unhook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Under torch.compile this is traced as nothing at all.
        if torch.compiler.is_compiling() or self._seen is None or not torch.is_grad_enabled():
            return
        self._seen(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHook:
        return ForwardHook()

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()
