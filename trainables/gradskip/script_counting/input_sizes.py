"""Sizes of the inputs of a script's training steps, by which the FLOPs of steps that are not measured follow.

For a call with inputs of N numbers for B samples, n = N and q = N^2 / B; a step has the sums over its c calls. A matrix
product is linear in n, attention over the length of a sequence in q. Of r of its calls a forward cache had the
prefix's outputs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainables.gradskip.execution_order import ForwardHook, in_backward
from trainables.gradskip.layers import unwrap
from trainables.gradskip.numbering import is_compiled
from trainables.workloads.batch_structure import tensors_in

#: A step's (c, n, q, r); none: the model's calls are not seen.
Size = tuple[int, int, int, int] | tuple[()]


class InputSizes:
    """Watch the calls of the model that trains; tell of the first training call of each step, with its own size."""

    def __init__(self, on_first_call: Callable[[Size], None]) -> None:
        self._on_first_call = on_first_call
        self._hook: ForwardHook | None = None
        self._watched: nn.Module | None = None
        self._sums = (0, 0, 0, 0)

    def watch(self, parameters: Sequence[Tensor], given: nn.Module | None) -> None:
        """Watch the model that has these parameters; none where it is compiled, or not found."""
        model = _owner(parameters) if given is None else given
        if self._hook is None and model is not None and not is_compiled(model):
            self._hook = ForwardHook(self._called)
            self._hook.watch(model)
            self._watched = unwrap(model)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if in_backward():
            return  # activations that are computed again
        found = [tensor for tensor in tensors_in((*args, kwargs)) if tensor.dim()]
        numbers = sum(tensor.numel() for tensor in found)
        squares = sum(tensor.numel() ** 2 // max(1, len(tensor)) for tensor in found)
        calls, n, q, reads = self._sums
        self._sums = (calls + 1, n + numbers, q + squares, reads)
        if not calls:
            self._on_first_call(self._sums)

    def read(self, model: nn.Module) -> None:
        """Note, before anything of a model's latest call was computed, that its prefix's outputs come from a cache.

        What another model than the watched one reads counts as computed.
        """
        if model is not self._watched:
            return
        calls, n, q, reads = self._sums
        self._sums = (calls, n, q, reads + 1)
        if calls == 1:
            self._on_first_call(self._sums)

    def take(self) -> Size:
        """Return the size of what was called since the last time."""
        found, self._sums = self._sums, (0, 0, 0, 0)
        return found if found[0] else ()


def _owner(parameters: Sequence[Tensor]) -> nn.Module | None:
    """Return the smallest module that has all of these parameters; None if there is none, or it is compiled."""
    wanted = {id(parameter) for parameter in parameters}
    # By type: a proxy may have lost its object.
    modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    having = (module for module in modules if wanted <= {id(parameter) for parameter in module.parameters()})
    found = [(sum(1 for _ in module.modules()), module) for module in having]
    if any(is_compiled(module) for _, module in found):
        return None
    return min(found, key=lambda pair: pair[0], default=(0, None))[1]


def fitted(known: Mapping[Size, float], size: Size) -> float:
    """Return the FLOPs of a step of a size, from those of others: linear in c, n and q, by relative least squares.

    >>> round(fitted({(1, 10, 100, 0): 120.0, (1, 20, 400, 0): 440.0}, (1, 40, 1600, 0)))
    1680
    >>> fitted({(1, 10, 100, 0): 120.0}, (1, 20, 400, 0))
    240.0
    """
    if size in known:
        return known[size]
    if not known:
        return 0.0
    sizes = [other for other in known if other]
    if not size or not sizes:
        return float(np.median(list(known.values())))
    # Few sizes determine few terms: n alone, n and q, then what each call costs, too.
    terms = [1, 1, 2, 3][min(len(sizes), 3)]
    columns = {1: [1], 2: [1, 2], 3: [0, 1, 2]}[terms]
    flops = np.array([known[other] for other in sizes], np.float64)
    if not flops.all():
        return 0.0
    rows = np.array([[other[column] for column in columns] for other in sizes], np.float64) / flops[:, None]
    scale = rows.max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    weights = np.linalg.lstsq(rows / scale, np.ones(len(sizes)), rcond=None)[0] / scale
    estimate = float(weights @ np.array([size[column] for column in columns], np.float64))
    return max(0.0, estimate)
