"""Losses under changes of single elements of parameters, many changes at once.

Shapes: P elements of a parameter, K changes; indices (K,) int64 in 0..P-1 of the flattened parameter, amounts (K,).
"""

from __future__ import annotations

import math
import operator
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainables.errors import UserError
from trainables.gradients.gradient_method import Loss, ModelLoss
from trainables.gradients.straight_through import sign_ste
from trainables.runtime.flops import flop_counter

#: Bytes that one chunk of changes may take, unless told.
MEMORY_BYTES = 256 * 2**20
#: Tensors as large as the largest one that live at the same time in a forward pass without gradients.
_ALIVE = 4
#: Changes of a weight, for each of its rows, from which on they are evaluated by rows.
_LEAST_ROW = 16
#: Chunks are tried from this size on, each this many times as large as the one before.
_FIRST_CHUNK, _GROWTH = 64, 2
#: The search for a size ends after this many in a row that were slower than the best, a change.
_SLOWER = 2


class Tuning:
    """Search for the size of a chunk that takes the least time a change, from real chunks.

    Args:
        most: largest size allowed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = min(_FIRST_CHUNK, most)
        """Size to use now."""
        self.ended = False
        self._best: tuple[float, int] | None = None
        self._slower = 0

    def told(self, seconds: float) -> None:
        """Note how long a chunk of `size` took, and choose the next size."""
        each = (seconds / self.size, self.size)
        self._slower = 0 if self._best is None or each < self._best else self._slower + 1
        self._best = each if self._best is None else min(self._best, each)
        if self.size == self.most or self._slower == _SLOWER:
            self.ended, self.size = True, self._best[1]
        else:
            self.size = min(_GROWTH * self.size, self.most)


#: Whether a model's parameters are changed by rows, by name, shape, memory bound and key.
_BY_ROWS: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()
#: Tunings of a model's parameters, likewise.
_TUNED: WeakKeyDictionary[nn.Module, dict[Hashable, Tuning]] = WeakKeyDictionary()


class _Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that is computed."""

    nbytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.nbytes = max(self.nbytes, leaf.nbytes)
        return found


class Perturbations:
    """Losses of one model on one batch under changes of single elements.

    Args:
        loss: loss(model) is a scalar tensor.
        model: left bit for bit as it is.
        chunk_size: changes evaluated at once, >= 1. None: tuned for each parameter at first use, within
            ``memory_bytes``. ``fixed``: the largest power of two within ``memory_bytes``, which shapes alone decide,
            so that a run repeats bit for bit.
        memory_bytes: bound on the memory of a chunk, as estimated from the largest tensor of one change.
        flop_counts: FLOPs of chunks by what they depend on, counted once and kept there; None counts nothing.
        key: what else the FLOPs depend on, such as the shapes of the batch.
        like: evaluated the same loss on another batch before, so that what was found out about it need not be again.

    Raises:
        UserError: a loss that is no scalar tensor or does not repeat, or a chunk size below 1.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        chunk_size: int | str | None = None,
        memory_bytes: int = MEMORY_BYTES,
        flop_counts: dict[Hashable, int] | None = None,
        key: Hashable = (),
        like: Perturbations | None = None,
    ) -> None:
        if chunk_size not in (None, "fixed") and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise UserError(f"chunk_size must be an integer >= 1, or None to have it tuned, got {chunk_size!r}")
        self.model = model
        self._loss = ModelLoss(loss, model)
        self._parameters = dict(model.named_parameters())
        self._chunk_size = chunk_size
        self._memory_bytes = memory_bytes
        self._counts = flop_counts
        self._key = key
        self.flops = 0
        """FLOPs executed by `losses` so far, if they are counted."""
        self.dtype: torch.dtype = self._loss.check_repeats().dtype if like is None else like.dtype
        """Dtype of the loss."""
        self._one_by_one: bool = like is not None and like._one_by_one
        self._layered: set[str] = set()

    @cached_property
    def value(self) -> Tensor:
        """Return the loss of the model as it is, ()."""
        # How the loss uses the parameters is seen in the same pass, for each loss anew: it may regularize by now.
        return self._counted("value", self._look)

    def _look(self) -> Tensor:
        found, self._layered = layered_parameters(self._loss.value, self._parameters)
        return found

    def losses(
        self, name: str, indices: Tensor, amounts: Tensor, advance: Callable[[int], object] = lambda count: None
    ) -> Tensor:
        """Return the losses with ``amounts[k]`` added to element ``indices[k]`` of a parameter, (K,).

        Args:
            name: of the parameter.
            indices: (K,) int64.
            amounts: (K,).
            advance: is told how many were evaluated, after each chunk.
        """
        indices = indices.to(self._loss.device)
        amounts = amounts.to(self._loss.device)
        found = torch.empty(len(indices), dtype=self.dtype, device=self._loss.device)
        for row, places in self._rows(name, indices):
            done = 0
            while done < len(places):
                size, tuning = self._chunk(name, row is not None, len(places) - done)
                part = places[done : done + size]
                evaluate = partial(self._run, name, indices[part], amounts[part], row)
                begun = 0.0 if tuning is None else self._now()
                found[part] = self._counted((name, row is not None, size), evaluate)
                if tuning is not None:
                    tuning.told(self._now() - begun)
                done += size
                advance(size)
        return found

    def together(self, changes: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with tensors added to parameters, in these parameters' own dtype, ()."""
        changed = {name: self._parameters[name].detach() + change for name, change in changes.items()}

        def evaluate() -> Tensor:
            with self._loss.evaluating():
                return self._loss.at(changed)

        return self._counted("value", evaluate)

    def _rows(self, name: str, indices: Tensor) -> Iterator[tuple[int | None, Tensor]]:
        """Yield groups of changes that are evaluated together: the row that they share, or None, and their places.

        Changes of one row, such as a filter, of a weight change one channel of the layer's output.
        """
        parameter = self._parameters[name]
        if parameter.ndim < 2 or len(indices) < _LEAST_ROW * parameter.shape[0] or not self._goes_by_rows(name):
            yield None, torch.arange(len(indices), device=indices.device)
            return
        order = torch.argsort(indices // parameter[0].numel(), stable=True)
        rows, counts = torch.unique_consecutive(indices[order] // parameter[0].numel(), return_counts=True)
        yield from zip(rows.tolist(), order.split(counts.tolist()), strict=True)

    def _goes_by_rows(self, name: str) -> bool:
        """Return whether changes of a weight may be evaluated by rows, tried once on its last element."""
        if name not in self._at_outputs() or self._one_by_one:
            return False
        known = _BY_ROWS.setdefault(self.model, {})
        key = (*self._kind(name), self._chunk_size is None)
        if key not in known:
            parameter = self._parameters[name]
            last = torch.full((2,), parameter.numel() - 1, device=self._loss.device)
            amounts = torch.tensor([1.0, -1.0], dtype=self.dtype, device=self._loss.device)
            try:
                by_rows = self._run(name, last, amounts, parameter.shape[0] - 1, must=True)
            except Exception:  # noqa: BLE001  # a model may do with an activation what a part of one cannot
                known[key] = False
            else:
                whole = self._run(name, last, amounts)
                effect = (whole - self.value).abs().max()
                tolerance = 1e-3 * effect + 64 * torch.finfo(self.dtype).eps * self.value.abs()
                known[key] = bool(((by_rows - whole).abs() <= tolerance).all()) and (
                    self._chunk_size is not None or self._is_faster_by_rows(name)
                )
        return known[key]

    def _kind(self, name: str) -> tuple[Hashable, ...]:
        return (name, tuple(self._parameters[name].shape), self._memory_bytes, self._key)

    def _is_faster_by_rows(self, name: str) -> bool:
        """Return whether a change takes less time by rows, measured on one row."""
        parameter = self._parameters[name]
        count = parameter[0].numel()
        inside = torch.arange(2 * count, device=self._loss.device) % count
        most = min(self._most(name, True), self._most(name, False))
        across = torch.arange(min(most, parameter.numel()), device=self._loss.device)
        each = []
        for indices, row in ((inside[:most], 0), (across, None)):
            zeros = torch.zeros(len(indices), dtype=self.dtype, device=indices.device)
            self._run(name, indices, zeros, row)
            begun = self._now()
            self._run(name, indices, zeros, row)
            each.append((self._now() - begun) / len(indices))
        return each[0] < each[1]

    def _now(self) -> float:
        """Return the time in seconds when everything that was begun on the device is done."""
        if self._loss.device.type == "cuda":
            torch.cuda.synchronize(self._loss.device)
        return time.perf_counter()

    def _counted(self, what: Hashable, evaluate: Callable[[], Tensor]) -> Tensor:
        """Return what ``evaluate`` returns, and add its FLOPs, which are equal for equal ``what``."""
        if self._counts is None:
            return evaluate()
        key = (self._key, what)
        if key in self._counts:
            found = evaluate()
        else:
            if what != "value":
                self._at_outputs()  # is counted by itself
            with flop_counter() as counter:
                found = evaluate()
            self._counts[key] = int(counter.get_total_flops())
        self.flops += self._counts[key]
        return found

    def _run(
        self, name: str, indices: Tensor, amounts: Tensor, row: int | None = None, *, must: bool = False
    ) -> Tensor:
        changed = self._function(name, row)
        if not self._one_by_one:
            try:
                with self._loss.evaluating():
                    return vmap(changed, randomness="same")(indices, amounts)
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
                if must or isinstance(error, (torch.OutOfMemoryError, UserError)):
                    raise
                if row is not None:  # this loss does with an activation what a part of one cannot
                    _BY_ROWS[self.model][*self._kind(name), self._chunk_size is None] = False
                    return self._run(name, indices, amounts)
                if isinstance(error, (TypeError, AttributeError)):
                    raise
                self._one_by_one = True
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    "the loss cannot be evaluated for many weights at once, so it is evaluated for one after the "
                    f"other: torch.func.vmap says {reason!r}",
                    stacklevel=2,
                )
        if name not in self._at_outputs() and self._parameters[name].is_contiguous():
            return torch.stack(list(self._loss.at_each(name, indices, amounts)))
        changed = self._function(name, None)
        found = []
        for index, amount in zip(indices, amounts, strict=True):
            with self._loss.evaluating():
                found.append(changed(index, amount))
        return torch.stack(found)

    def _function(self, name: str, row: int | None) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss as a function of a flat index and of what is added there."""
        parameter = self._parameters[name]
        if name in self._at_outputs():

            def at_output(index: Tensor, amount: Tensor) -> Tensor:
                with ChangedOutput(parameter, index, amount, row):
                    return self._loss.at({})

            return at_output
        flat = parameter.detach().reshape(-1)
        places = torch.arange(flat.numel(), device=flat.device)

        def in_place(index: Tensor, amount: Tensor) -> Tensor:
            changed = torch.where(places == index, flat + amount.to(flat.dtype), flat)
            return self._loss.at({name: changed.view(parameter.shape)})

        return in_place

    def _at_outputs(self) -> set[str]:
        """Return the parameters whose changes are made at layers' outputs."""
        _ = self.value
        return self._layered

    def _chunk(self, name: str, by_rows: bool, left: int) -> tuple[int, Tuning | None]:
        """Return the size of the next chunk, and the tuning that it is part of."""
        if isinstance(self._chunk_size, int):
            return min(self._chunk_size, left), None
        known = _TUNED.setdefault(self.model, {})
        key = (*self._kind(name), by_rows)
        if key not in known:
            known[key] = Tuning(self._most(name, by_rows))
        tuning = known[key]
        if self._chunk_size == "fixed":
            return min(tuning.most, left), None
        # A chunk that the end of the parameter cuts short tells little about its size.
        return min(tuning.size, left), tuning if not tuning.ended and left >= tuning.size else None

    def _most(self, name: str, by_rows: bool) -> int:
        """Return the largest power of two of changes whose tensors fit in the memory bound, at least 1."""
        two = torch.zeros(2, dtype=torch.int64, device=self._loss.device)
        with _Largest() as largest:
            self._run(name, two, torch.zeros(2, dtype=self.dtype, device=self._loss.device), 0 if by_rows else None)
        each = max(1, largest.nbytes // 2) * _ALIVE
        return 1 << max(0, (self._memory_bytes // each).bit_length() - 1)


# --- Activations that differ from known ones in a few channels only ---------------------------------------------------
# A change of one weight changes one channel of its layer's output. What follows, an activation function, pooling, a
# normalisation, works on each channel alone, and the next layer is linear: so only that channel is computed anew, and
# the next layer receives the difference. Whatever else a model does with the activation, it does with all of its
# channels.
#
# Shapes: base (..., C, ...) with the channels in dimension d; part (..., b - a, ...), channels a to b as they are now.


_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__)
_POOLS = (
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
)  # fmt: skip
#: Functions that treat each element alone.
_ELEMENTWISE = frozenset({
    F.relu, torch.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.leaky_relu, F.elu, F.hardtanh,
    F.softplus, F.relu6, F.hardswish, F.mish, F.selu, torch.square, torch.abs, torch.exp, torch.sin, torch.sign,
    sign_ste,
})  # fmt: skip
#: Methods of a tensor that treat each element alone.
_ELEMENTWISE_METHODS = (
    "relu",
    "tanh",
    "sigmoid",
    "square",
    "abs",
    "exp",
    "sin",
    "sign",
    "contiguous",
    "float",
    "double",
)
#: Convolutions by their number of dimensions, and their arguments in order.
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
#: What a tensor tells about itself without its numbers.
_FACTS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse", "is_nested", "names")
_FACT_CALLS = ("size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous")


class PartError(TypeError):
    """A model writes into an activation that is known by parts."""


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


class ChannelPart:
    """An activation whose channels a to b are other ones than in a known activation.

    It stands for the tensor in calls of torch functions, methods and operators; what it cannot do by parts is done with
    `whole`. Writing into it raises `PartError`, but for the functions that are known here.

    Args:
        base: the known activation.
        part: channels a to b as they are.
        start: a.
        dim: dimension of the channels.
    """

    def __init__(self, base: Tensor, part: Tensor, start: int, dim: int) -> None:
        self.base = base
        self.part = part
        self.start = start
        self.dimension = dim

    @property
    def width(self) -> int:
        """Return b - a."""
        return int(self.part.shape[self.dimension])

    def whole(self) -> Tensor:
        """Return the activation as a tensor."""
        end = self.start + self.width
        before = self.base.narrow(self.dimension, 0, self.start)
        after = self.base.narrow(self.dimension, end, self.base.shape[self.dimension] - end)
        return torch.cat([before, self.part, after], self.dimension)

    def _of(self, tensor: Tensor) -> Tensor:
        """Return the channels a to b of a tensor of the activation's shape."""
        return tensor.narrow(self.dimension, self.start, self.width)

    def _each(self, function: Callable[[Tensor], Tensor]) -> ChannelPart:
        return ChannelPart(function(self.base), function(self.part), self.start, self.dimension)

    def _difference(self) -> Tensor:
        return self.part - self._of(self.base)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)
        if "out" in kwargs or (_writes(getattr(func, "__name__", "")) and isinstance(first, ChannelPart)):
            raise PartError(f"{func} writes into an activation")
        if func in _ADDITIONS and len(args) == 2 and not kwargs and isinstance(args[1], ChannelPart):
            return args[1]._combined(first, lambda mine, its: its + mine)
        if (
            args
            and isinstance(first, ChannelPart)
            and not any(isinstance(a, ChannelPart) for a in (*args[1:], *kwargs.values()))
        ):
            found = first._by_parts(func, args[1:], kwargs)
            if found is not None:
                return found
        return func(*_whole(args), **_whole(kwargs))

    def _by_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _ELEMENTWISE:
            more = {name: value for name, value in kwargs.items() if name != "inplace"}
            found = self._each(lambda x: func(x, *args, **more))
            return self._become(found) if kwargs.get("inplace") else found
        if func in _POOLS and self.dimension == 1 and self.base.ndim > 2 and not kwargs.get("return_indices"):
            return self._each(lambda x: func(x, *args, **kwargs))
        if func is torch.flatten and (args or (kwargs.get("start_dim"),)) == (1,) and not kwargs.get("end_dim"):
            return self._flat()
        if func is F.linear and self.dimension == self.base.ndim - 1:
            weight = args[0] if args else kwargs["weight"]
            columns = weight.narrow(1, self.start, self.width)
            return func(self.base, *args, **kwargs) + F.linear(self._difference(), columns)
        if func in CONVOLUTIONS and self.dimension == 1 and self.base.ndim == CONVOLUTIONS[func] + 2:
            return self._convolved(func, args, kwargs)
        if func is F.batch_norm and self.dimension == 1:
            return self._normalised(*args, **kwargs)
        return None

    def _convolved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = {**dict(zip(CONVOLUTION_ARGUMENTS[1:], args, strict=False)), **kwargs}
        if call.get("groups", 1) != 1:
            return None
        columns = call["weight"].narrow(1, self.start, self.width)
        changed = func(self._difference(), **{**call, "weight": columns, "bias": None})
        return func(self.base, **call) + changed

    def _normalised(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **more: Any,
    ) -> ChannelPart:
        def own(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.narrow(0, self.start, self.width)

        whole = F.batch_norm(self.base, running_mean, running_var, weight, bias, *rest, **more)
        part = F.batch_norm(self.part, own(running_mean), own(running_var), own(weight), own(bias), *rest, **more)
        return ChannelPart(whole, part, self.start, self.dimension)

    def _flat(self) -> ChannelPart | None:
        if self.dimension != 1:
            return None
        places = self.base[0, 0].numel()
        return ChannelPart(self.base.flatten(1), self.part.flatten(1), self.start * places, 1)

    def _combined(self, other: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Return what an operator gives that treats each element alone, with this activation on the left."""
        if isinstance(other, Tensor) and other.shape == self.base.shape:
            part = combine(self.part, self._of(other))
            return ChannelPart(combine(self.base, other), part, self.start, self.dimension)
        if isinstance(other, (int, float)):
            return self._each(lambda x: combine(x, other))
        return combine(self.whole(), _whole(other))

    def __add__(self, other: Any) -> Any:
        return self._combined(other, operator.add)

    def __iadd__(self, other: Any) -> Any:
        return self._become(self + other)

    def __imul__(self, other: Any) -> Any:
        return self._become(self * other)

    def _become(self, found: Any) -> ChannelPart:
        """Take the value of another part, as an operation in place does."""
        if not isinstance(found, ChannelPart):
            raise PartError("an operation in place needs the whole activation")
        self.base, self.part = found.base, found.part  # the known activation itself is used again
        return self

    def __radd__(self, other: Any) -> Any:
        return self._combined(other, lambda mine, its: its + mine)

    def __mul__(self, other: Any) -> Any:
        return self._combined(other, operator.mul)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> Any:
        return self.whole()[key]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Return the activation with its dimensions joined, as `torch.Tensor.flatten`."""
        flat = self._flat() if (start_dim, end_dim) == (1, -1) else None
        return self.whole().flatten(start_dim, end_dim) if flat is None else flat

    def view(self, *shape: Any) -> Any:
        """Return the activation in another shape, as `torch.Tensor.view`."""
        sizes = tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list)) else shape
        flat = self._flat() if len(sizes) == 2 and sizes[0] in (self.base.shape[0], -1) else None
        return flat if flat is not None and sizes[1] in (-1, flat.base.shape[1]) else self.whole().reshape(*shape)

    reshape = view

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS or name in _FACT_CALLS:
            return getattr(self.base, name)
        if name in _ELEMENTWISE_METHODS:
            return lambda *args, **kwargs: self._each(lambda x: getattr(x, name)(*args, **kwargs))
        if name.startswith("__"):
            raise AttributeError(name)
        if _writes(name):
            raise PartError(f"{name} writes into an activation")
        return getattr(self.whole(), name)


def _refuse(self: ChannelPart, *_: Any) -> Any:
    raise PartError("an operation in place writes into an activation")


def _operate(name: str) -> Callable[..., Any]:
    def operated(self: ChannelPart, *others: Any) -> Any:
        return getattr(self.whole(), name)(*_whole(others))

    return operated


for _name in (
    "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__neg__", "__matmul__", "__rmatmul__",
    "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__",
):  # fmt: skip
    setattr(ChannelPart, _name, _operate(_name))


for _name in ("__setitem__", "__isub__", "__itruediv__", "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__"):
    setattr(ChannelPart, _name, _refuse)


def _whole(values: Any) -> Any:
    """Return arguments with tensors in place of parts."""
    return tree_map(lambda value: value.whole() if isinstance(value, ChannelPart) else value, values)


# --- Changes of single weights at the outputs of layers, in place of the weights --------------------------------------
# A weight of a linear layer, a convolution or an embedding reaches the loss through one channel of the layer's output.
# So its change can be added there, and under `torch.func.vmap` everything before the layer, and the layer itself, is
# computed once for all changes instead of once for each.
#
# Shapes: layer input x, output y; linear: x (..., I), y (..., O), weight (O, I); convolution of d dimensions:
# x (B, I, *in), y (B, O, *out) or without B, weight (O, I / groups, *kernel); embedding: x (...) int64, y (..., E),
# weight (V, E). An element of a parameter has a flat index, a tensor () int64.

#: Arguments in order of functions at whose output a change of a weight has a form.
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    **dict.fromkeys(CONVOLUTIONS, CONVOLUTION_ARGUMENTS),
}
#: Functions that return a tensor's numbers as something else.
_READERS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__", "__deepcopy__")

#: One call of a layer: its arguments by name.
Call = Mapping[str, Any]


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return a call's arguments by name; None for a function that is not in `_ARGUMENTS`."""
    return {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs} if func in _ARGUMENTS else None


def _slot(call: Call, parameter: Tensor) -> str | None:
    """Return where a call takes the parameter in a way that has a form at the output: ``weight``, ``bias`` or None."""
    slots = [name for name, value in call.items() if value is parameter]
    if slots not in (["weight"], ["bias"]) or call.get("max_norm") is not None:
        return None
    return slots[0]


class _Uses(TorchFunctionMode):
    """Record how each parameter is used: through `_slot`, or otherwise."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.layered: dict[str, int] = defaultdict(int)
        self.otherwise: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        call = _call(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if name is None:
                continue
            if call is not None and _slot(call, leaf):
                self.layered[name] += 1
            elif getattr(func, "__name__", "") in _READERS or any(isinstance(t, Tensor) for t in tree_leaves(found)):
                self.otherwise.add(name)
        return found


def layered_parameters(call: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> tuple[Tensor, set[str]]:
    """Return the result of a call, and the parameters that it uses only as weights or biases of layers.

    The outputs of these layers can be changed instead. A weight that is also in a regularization term, tied to another
    layer or computed with otherwise is not among them.

    Args:
        call: runs the loss.
        parameters: the tensors that it uses, by name.
    """
    with _Uses(parameters) as uses:
        found = call()
    return found, {name for name in uses.layered if name not in uses.otherwise}


class ChangedOutput(TorchFunctionMode):
    """Add what a change of one element of a parameter does to the outputs of the layers that use it.

    Args:
        parameter: one of `layered_parameters`.
        index: flat index of the element, () int64.
        amount: what is added to it, ().
        row: the element's index in the parameter's first dimension, where it is known: the output is then a
            `ChannelPart`, with this channel alone computed anew in what follows.
    """

    def __init__(self, parameter: Tensor, index: Tensor, amount: Tensor, row: int | None = None) -> None:
        super().__init__()
        self._parameter = parameter
        self._index = index
        self._amount = amount
        self._row = row

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = _call(func, args, kwargs)
        slot = None if call is None else _slot(call, self._parameter)
        if call is None or slot is None:
            return out
        if func in CONVOLUTIONS:
            return self._convolution(call, slot, out, CONVOLUTIONS[func])
        if slot == "bias":
            return out + _one_hot(self._index, out.shape[-1], out) * self._amount.to(out.dtype)
        row, column = self._index // self._parameter.shape[1], self._index % self._parameter.shape[1]
        if func is F.linear and self._row is not None and isinstance(out, Tensor):
            part = call["input"].index_select(-1, column.view(1)).to(out.dtype) * self._amount.to(out.dtype)
            return ChannelPart(out, out.narrow(-1, self._row, 1) + part, self._row, out.ndim - 1)
        if func is F.embedding:
            met = call["input"] == row
            if call.get("padding_idx") is not None:  # a padding's row has no gradient in torch either
                met = met & (row != call["padding_idx"] % self._parameter.shape[0])
            met = met.unsqueeze(-1).to(out.dtype)
            return torch.addcmul(out, met * self._amount.to(out.dtype), _one_hot(column, out.shape[-1], out))
        part = call["input"].index_select(-1, column.view(1)).to(out.dtype)
        return torch.addcmul(out, part * self._amount.to(out.dtype), _one_hot(row, out.shape[-1], out))

    def _convolution(self, call: Call, slot: str, out: Tensor, dimensions: int) -> Tensor | ChannelPart:
        channels = out.shape[-dimensions - 1]
        trailing = (1,) * dimensions
        if slot == "bias":
            return out + _one_hot(self._index, channels, out).view(channels, *trailing) * self._amount.to(out.dtype)
        weight, groups = self._parameter, int(call.get("groups", 1))
        kernel = math.prod(weight.shape[2:])
        place = self._index % kernel
        channel_in_group = self._index // kernel % weight.shape[1]
        filter_ = self._index // (kernel * weight.shape[1])
        channel = filter_ // (channels // groups) * weight.shape[1] + channel_in_group
        patches = _patches(call, weight, out.shape[-dimensions:], dimensions)
        part = patches.index_select(0, (place * groups * weight.shape[1] + channel).view(1)).squeeze(0).to(out.dtype)
        part = part.unsqueeze(-dimensions - 1) * self._amount.to(out.dtype)
        if self._row is not None and out.ndim == dimensions + 2:
            return ChannelPart(out, out.narrow(1, self._row, 1) + part, self._row, 1)
        return torch.addcmul(out, part, _one_hot(filter_, channels, out).view(channels, *trailing))


def _one_hot(index: Tensor, size: int, like: Tensor) -> Tensor:
    return (torch.arange(size, device=like.device) == index).to(like.dtype)


def _patches(call: Call, weight: Tensor, out_shape: Iterable[int], dimensions: int) -> Tensor:
    """Return what each place of the kernel sees: (places x channels, B, *out), or without B."""
    out = tuple(out_shape)

    def each(name: str, default: int) -> tuple[int, ...]:
        value = call.get(name, default)
        value = (value,) * dimensions if isinstance(value, int) else tuple(value)
        return value * dimensions if len(value) == 1 else value

    stride, dilation = each("stride", 1), each("dilation", 1)
    kernel = weight.shape[2:]
    x = call["input"]
    if call.get("padding", 0) != "valid":
        if call.get("padding") == "same":
            totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(p, p) for p in each("padding", 0)]
        x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    views = []
    for place in product(*map(range, kernel)):
        cut: tuple[Any, ...] = (Ellipsis,)
        for k, d, s, o in zip(place, dilation, stride, out, strict=True):
            cut += (slice(k * d, k * d + (o - 1) * s + 1, s),)
        views.append(x[cut].movedim(-dimensions - 1, 0))
    return torch.cat(views)
