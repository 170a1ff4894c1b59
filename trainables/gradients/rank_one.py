"""Changes of single weights at the outputs of layers, in place of the weights.

A weight of a linear layer, a convolution or an embedding reaches the loss through one channel of the layer's output. So
its change can be added there, and under `torch.func.vmap` everything before the layer, and the layer itself, is
computed once for all changes instead of once for each.

Shapes: layer input x, output y; linear: x (..., I), y (..., O), weight (O, I); convolution of d dimensions:
x (B, I, *in), y (B, O, *out) or without B, weight (O, I / groups, *kernel); embedding: x (...) int64, y (..., E),
weight (V, E). An element of a parameter has a flat index, a tensor () int64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainables.gradients.channel_parts import CONVOLUTION_ARGUMENTS, CONVOLUTIONS, ChannelPart

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
