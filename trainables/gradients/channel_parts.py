"""Activations that differ from known ones in a few channels only.

A change of one weight changes one channel of its layer's output. What follows, an activation function, pooling, a
normalisation, works on each channel alone, and the next layer is linear: so only that channel is computed anew, and the
next layer receives the difference. Whatever else a model does with the activation, it does with all of its channels.

Shapes: base (..., C, ...) with the channels in dimension d; part (..., b - a, ...), channels a to b as they are now.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from trainables.gradients.straight_through import sign_ste

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
