"""Sizes of the inputs of a script's training steps, by which the FLOPs of steps that are not measured follow.

For a call with inputs of N numbers for B samples, n = N and q = N^2 / B; a step has the sums over its c calls. A matrix
product is linear in n, attention over the length of a sequence in q. Of r of its calls a forward cache had the
prefix's outputs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from trainables.gradskip.execution_order import ForwardHook, in_backward, is_traced
from trainables.gradskip.layers import unwrap
from trainables.gradskip.numbering import is_compiled
from trainables.workloads.batch_structure import tensors_in

#: Training calls behind which a step is taken for an evaluation with gradients, if none had half as many.
_MOST_CALLS = 64
#: A step's (c, n, q, r); none: the model's calls are not seen.
Size = tuple[int, int, int, int] | tuple[()]


class WatchedCalls:
    """Training calls of one module, which are added to sizes."""

    def __init__(self, sizes: InputSizes, *, were_seen: bool = False) -> None:
        self.were_seen = were_seen
        self.hook = ForwardHook(self._called, sizes.other_call)
        self._sizes = sizes

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._sizes.is_recomputed():
            self.were_seen = True
            self._sizes.add(args, kwargs)


class InputSizes:
    """Watch the calls of the models that train; tell of the first training call of each step, with its own size.

    ``on_evaluation`` is called where one is called without gradients before that, ``on_other`` where one is about to be
    recorded (`torch.jit.trace`), or was called too often.

    A model that is not called itself by its optimizer's first step (`model.loss(x)`, an encoder and a decoder of one
    optimizer) is watched by the modules that own its parameters.
    """

    def __init__(
        self, on_first_call: Callable[[Size], None], on_evaluation: Callable[[], None], on_other: Callable[[], None]
    ) -> None:
        self._on_first_call, self._on_evaluation, self._on_other = on_first_call, on_evaluation, on_other
        self._watched: WeakKeyDictionary[nn.Module, WatchedCalls] = WeakKeyDictionary()
        self._sums = (0, 0, 0, 0)
        self._passes = 0  # of the step's calls through a forward cache
        self._most_calls = 0  # of a step
        self._trains_in_backward = False  # whether the step's first call came in a backward pass

    def is_recomputed(self) -> bool:
        """Return whether a call computes activations again.

        Where a step calls its model in a backward pass first, it trains there, as with cached gradients of embeddings.
        """
        backward = in_backward()
        if not self._sums[0]:
            self._trains_in_backward = backward
        return backward and not self._trains_in_backward

    def watch(self, parameters: Sequence[Tensor], given: nn.Module | None) -> WatchedCalls:
        """Watch the model that has these parameters; none where it is compiled."""
        having = _having(parameters) if given is None else [given]
        whole = min(having, key=lambda module: sum(1 for _ in module.modules()), default=None)
        if whole is None or isinstance(whole, torch.jit.ScriptModule):
            return WatchedCalls(self, were_seen=bool(having))  # what has no one owner is watched by its parts
        if any(map(is_compiled, having)):
            return self._watched.setdefault(unwrap(whole), WatchedCalls(self, were_seen=True))
        return self._watch(whole)

    def watch_parts(self, parameters: Sequence[Tensor]) -> None:
        """Watch the modules that own these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for module in _modules():
            if not wanted.isdisjoint(map(id, vars(module)["_parameters"].values())) and not is_compiled(module):
                self._watch(module)

    def _watch(self, module: nn.Module) -> WatchedCalls:
        known = self._watched.get(unwrap(module))
        if known is None:
            known = self._watched[unwrap(module)] = WatchedCalls(self)
            known.hook.watch(module)
        return known

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add the inputs of a call to the step's size."""
        found = [tensor for tensor in tensors_in((*args, kwargs)) if tensor.dim()]
        numbers = sum(tensor.numel() for tensor in found)
        squares = sum(tensor.numel() ** 2 // max(1, tensor.size(0)) for tensor in found)  # nested ones have no length
        calls, n, q, reads = self._sums
        self._sums = (calls + 1, n + numbers, q + squares, reads)
        if not calls:
            self._on_first_call(self._sums)
        if self._most_calls and calls == max(_MOST_CALLS, 2 * self._most_calls):
            self._on_other()

    def other_call(self) -> None:
        """Tell of a call that is no training, or of one in a reentrant checkpoint."""
        if is_traced():
            self._on_other()
        elif not self._sums[0]:
            self._on_evaluation()

    def note_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reads: bool) -> None:
        """Note, before anything of a model's latest call is computed, whether its prefix's outputs come from a cache.

        Of a compiled model no hook sees the call. What another model than those watched reads counts as computed.
        """
        known = self._watched.get(model)
        if known is None:
            return
        self._passes += 1
        if self._sums[0] < self._passes and not in_backward():
            known.were_seen = True
            self.add(args, kwargs)
        if not reads:
            return
        calls, n, q, before = self._sums
        self._sums = (calls, n, q, before + 1)
        if calls == 1:
            self._on_first_call(self._sums)

    def take(self) -> Size:
        """Return the size of what was called since the last time."""
        found, self._sums, self._passes = self._sums, (0, 0, 0, 0), 0
        self._most_calls = max(self._most_calls, found[0])
        return found if found[0] else ()


def _modules() -> list[nn.Module]:
    """Return the modules of the process, without scripted ones, which take no hooks, and those that are half made."""
    # By type: a proxy may have lost its object.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    return [one for one in modules if "_parameters" in vars(one) and not isinstance(one, torch.jit.ScriptModule)]


def _having(parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return the modules that have all of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [module for module in _modules() if wanted <= {id(parameter) for parameter in module.parameters()}]


def reads_of(size: Size) -> int:
    """Return how many of a step's calls read from a cache."""
    return sum(size[3:])


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
