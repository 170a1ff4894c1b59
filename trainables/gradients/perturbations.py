"""Losses under changes of single elements of parameters, many changes at once.

Shapes: P elements of a parameter, K changes; indices (K,) int64 in 0..P-1 of the flattened parameter, amounts (K,).
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

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
from trainables.runtime.operator_flops import flop_counter

#: Bytes that one chunk of changes may take, unless told.
MEMORY_BYTES = 256 * 2**20
#: Tensors as large as the largest one that live at the same time in a forward pass without gradients.
_ALIVE = 4
#: Changes of a weight, for each of its rows, from which on they are evaluated by rows.
_LEAST_ROW = 16


class _Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that is computed."""

    nbytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, Tensor))])
        return found


class Perturbations:
    """Losses of one model on one batch under changes of single elements.

    Args:
        loss: loss(model) is a scalar tensor.
        model: left bit for bit as it is.
        chunk_size: changes evaluated at once, >= 1. None: the largest power of two within ``memory_bytes``, which
            shapes alone decide, so that a run repeats bit for bit.
        memory_bytes: bound on the memory of a chunk, as estimated from the largest tensor of one change.
        flop_counts: FLOPs of chunks by what they depend on, counted once and kept there; None counts nothing.
        key: what else the FLOPs depend on, such as the shapes of the batch.
        like: an instance for the same loss on another batch; its checks and counts are used again.

    Raises:
        UserError: a loss that is no scalar tensor or does not repeat, or a chunk size below 1.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        chunk_size: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
        flop_counts: dict[Hashable, int] | None = None,
        key: Hashable = (),
        like: Perturbations | None = None,
    ) -> None:
        if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise UserError(f"chunk_size must be an integer >= 1, or None for what fits in memory, got {chunk_size!r}")
        self.model = model
        self._loss = ModelLoss(loss, model)
        self._parameters = dict(model.named_parameters())
        self._chunk_size, self._memory_bytes = chunk_size, memory_bytes
        self._counts, self._key = flop_counts, key
        self.flops = 0
        """FLOPs executed so far, if they are counted."""
        self.dtype: torch.dtype = self._loss.check_repeats().dtype if like is None else like.dtype
        """Dtype of the loss."""
        self._one_by_one: bool = like is not None and like._one_by_one
        self._by_rows: dict[Hashable, bool] = {} if like is None else like._by_rows
        self._sizes: dict[Hashable, int] = {} if like is None else like._sizes
        self._at_outputs: set[str] = set()
        self.value: Tensor = self._counted("value", self._look)
        """Loss of the model as it is, ()."""

    def _look(self) -> Tensor:
        # How the loss uses the parameters is seen for each loss anew: it may regularize by now.
        found, self._at_outputs = layered_parameters(self._loss.value, self._parameters)
        return found

    def losses(
        self, name: str, indices: Tensor, amounts: Tensor, advance: Callable[[int], object] = lambda count: None
    ) -> Tensor:
        """Return the losses with ``amounts[k]`` added to element ``indices[k]`` of a parameter, (K,).

        After each chunk, ``advance`` is told how many were evaluated.
        """
        indices, amounts = indices.to(self._loss.device), amounts.to(self._loss.device)
        found = torch.empty(len(indices), dtype=self.dtype, device=self._loss.device)
        for row, places in self._groups(name, indices):
            for part in places.split(self._chunk_size or self._most(name, row is not None)):
                evaluate = partial(self._run, name, indices[part], amounts[part], row)
                found[part] = self._counted((name, row is not None, len(part)), evaluate)
                advance(len(part))
        return found

    def together(self, changes: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with tensors added to parameters, in these parameters' own dtype, ()."""
        changed = {name: self._parameters[name].detach() + change for name, change in changes.items()}

        def evaluate() -> Tensor:
            with self._loss.evaluating():
                return self._loss.at(changed)

        return self._counted("value", evaluate)

    def _groups(self, name: str, indices: Tensor) -> Iterator[tuple[int | None, Tensor]]:
        """Yield groups of changes that are evaluated together: the row that they share, or None, and their places.

        Changes of one row, such as a filter, of a weight change one channel of the layer's output.
        """
        parameter = self._parameters[name]
        if parameter.ndim < 2 or len(indices) < _LEAST_ROW * parameter.shape[0] or not self._goes_by_rows(name):
            yield None, torch.arange(len(indices), device=indices.device)
            return
        of_change = indices // parameter[0].numel()
        order = torch.argsort(of_change, stable=True)
        rows, counts = torch.unique_consecutive(of_change[order], return_counts=True)
        yield from zip(rows.tolist(), order.split(counts.tolist()), strict=True)

    def _goes_by_rows(self, name: str) -> bool:
        """Return whether changes of a weight may be evaluated by rows, tried once on its last element."""
        if name not in self._at_outputs or self._one_by_one:
            return False
        if (name, self._key) not in self._by_rows:
            parameter = self._parameters[name]
            last = torch.full((2,), parameter.numel() - 1, device=self._loss.device)
            amounts = torch.tensor([1.0, -1.0], dtype=self.dtype, device=self._loss.device)
            try:
                by_rows = self._run(name, last, amounts, parameter.shape[0] - 1, must=True)
            except Exception:  # noqa: BLE001  # a model may do with an activation what a part of one cannot
                self._by_rows[name, self._key] = False
            else:
                whole = self._run(name, last, amounts)
                effect = (whole - self.value).abs().max()
                tolerance = 1e-3 * effect + 64 * torch.finfo(self.dtype).eps * self.value.abs()
                self._by_rows[name, self._key] = bool(((by_rows - whole).abs() <= tolerance).all())
        return self._by_rows[name, self._key]

    def _most(self, name: str, by_rows: bool) -> int:
        """Return the largest power of two of changes whose tensors fit in the memory bound, at least 1."""
        key = (name, by_rows, self._key)
        if key not in self._sizes:
            two = torch.zeros(2, dtype=torch.int64, device=self._loss.device)
            with _Largest() as largest:
                self._run(name, two, torch.zeros(2, dtype=self.dtype, device=two.device), 0 if by_rows else None)
            each = max(1, largest.nbytes // 2) * _ALIVE
            self._sizes[key] = 1 << max(0, (self._memory_bytes // each).bit_length() - 1)
        return self._sizes[key]

    def _counted(self, what: Hashable, evaluate: Callable[[], Tensor]) -> Tensor:
        """Return what ``evaluate`` returns, and add its FLOPs, which are equal for equal ``what``."""
        if self._counts is None:
            return evaluate()
        key = (self._key, what)
        if key in self._counts:
            found = evaluate()
        else:
            with flop_counter() as counter:
                found = evaluate()
            self._counts[key] = int(counter.get_total_flops())
        self.flops += self._counts[key]
        return found

    def _run(
        self, name: str, indices: Tensor, amounts: Tensor, row: int | None = None, *, must: bool = False
    ) -> Tensor:
        if not self._one_by_one:
            try:
                with self._loss.evaluating():
                    return vmap(self._function(name, row), randomness="same")(indices, amounts)
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
                if must or isinstance(error, (torch.OutOfMemoryError, UserError)):
                    raise
                if row is not None:  # this loss does with an activation what a part of one cannot
                    self._by_rows[name, self._key] = False
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
        if name not in self._at_outputs and self._parameters[name].is_contiguous():
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
        if name in self._at_outputs:

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
#: Functions, and methods of a tensor, that treat each element alone.
_ELEMENTWISE = frozenset({
    F.relu, torch.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.leaky_relu, F.elu, F.hardtanh,
    F.softplus, F.relu6, F.hardswish, F.mish, F.selu, torch.square, torch.abs, torch.exp, torch.sin, torch.sign,
    sign_ste,
})  # fmt: skip
_ELEMENTWISE_METHODS = (
    "relu", "tanh", "sigmoid", "square", "abs", "exp", "sin", "sign", "contiguous", "float", "double",
)  # fmt: skip
#: Convolutions by their number of dimensions, and their arguments in order.
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
#: Attributes and methods that tell about a tensor without its numbers.
_FACTS = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse", "is_nested", "names",
    "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous",
)  # fmt: skip


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
        self.base, self.part, self.start, self.dimension = base, part, start, dim

    def whole(self) -> Tensor:
        """Return the activation as a tensor."""
        end = self.start + self.part.shape[self.dimension]
        before = self.base.narrow(self.dimension, 0, self.start)
        after = self.base.narrow(self.dimension, end, self.base.shape[self.dimension] - end)
        return torch.cat([before, self.part, after], self.dimension)

    def _own(self, tensor: Any, dim: int) -> Any:
        """Return the entries of channels a to b in a dimension of a tensor; None of None."""
        return None if tensor is None else tensor.narrow(dim, self.start, self.part.shape[self.dimension])

    def _each(self, function: Callable[[Tensor], Tensor]) -> ChannelPart:
        return ChannelPart(function(self.base), function(self.part), self.start, self.dimension)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else next(iter(kwargs.values()), None)
        others = (*args[1:], *kwargs.values())
        if "out" in kwargs or (_writes(getattr(func, "__name__", "")) and isinstance(first, ChannelPart)):
            raise PartError(f"{func} writes into an activation")
        if func in _ADDITIONS and len(args) == 2 and not kwargs and isinstance(args[1], ChannelPart):
            return args[1]._combined(first, operator.add)
        if args and isinstance(first, ChannelPart) and not any(isinstance(other, ChannelPart) for other in others):
            found = first._by_parts(func, args[1:], kwargs)
            if found is not None:
                return found
        return func(*_whole(args), **_whole(kwargs))

    def _by_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function gives; None where it needs the whole activation."""
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
            return func(self.base, *args, **kwargs) + F.linear(self._difference(), self._own(weight, 1))
        if func in CONVOLUTIONS and self.dimension == 1 and self.base.ndim == CONVOLUTIONS[func] + 2:
            call = {**dict(zip(CONVOLUTION_ARGUMENTS[1:], args, strict=False)), **kwargs}
            if call.get("groups", 1) != 1:
                return None
            own = {**call, "weight": self._own(call["weight"], 1), "bias": None}
            return func(self.base, **call) + func(self._difference(), **own)
        if func is F.batch_norm and self.dimension == 1:
            return self._normalised(*args, **kwargs)
        return None

    def _difference(self) -> Any:
        return self.part - self._own(self.base, self.dimension)

    def _normalised(self, mean: Any, var: Any, weight: Any = None, bias: Any = None, *rest: Any, **more: Any) -> Any:
        own = [self._own(values, 0) for values in (mean, var, weight, bias)]
        whole = F.batch_norm(self.base, mean, var, weight, bias, *rest, **more)
        return ChannelPart(whole, F.batch_norm(self.part, *own, *rest, **more), self.start, self.dimension)

    def _flat(self) -> ChannelPart | None:
        if self.dimension != 1:
            return None
        places = self.base[0, 0].numel()
        return ChannelPart(self.base.flatten(1), self.part.flatten(1), self.start * places, 1)

    def _combined(self, other: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Return the result of an element-wise operator."""
        if isinstance(other, Tensor) and other.shape == self.base.shape:
            part = combine(self.part, self._own(other, self.dimension))
            return ChannelPart(combine(self.base, other), part, self.start, self.dimension)
        if isinstance(other, (int, float)):
            return self._each(lambda x: combine(x, other))
        return combine(self.whole(), _whole(other))

    def _become(self, found: Any) -> ChannelPart:
        """Take the value of another part, as an operation in place does."""
        if not isinstance(found, ChannelPart):
            raise PartError("an operation in place needs the whole activation")
        self.base, self.part = found.base, found.part  # the known activation itself is used again
        return self

    def __add__(self, other: Any) -> Any:
        return self._combined(other, operator.add)

    def __mul__(self, other: Any) -> Any:
        return self._combined(other, operator.mul)

    def __iadd__(self, other: Any) -> Any:
        return self._become(self + other)

    def __imul__(self, other: Any) -> Any:
        return self._become(self * other)

    __radd__, __rmul__ = __add__, __mul__

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
        if name in _FACTS:
            return getattr(self.base, name)
        if name in _ELEMENTWISE_METHODS:
            return lambda *args, **kwargs: self._each(lambda x: getattr(x, name)(*args, **kwargs))
        if name.startswith("__"):
            raise AttributeError(name)
        if _writes(name):
            raise PartError(f"{name} writes into an activation")
        return getattr(self.whole(), name)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.whole(), name)(*_whole(others))


def _refuse(self: ChannelPart, *_: Any) -> Any:
    raise PartError("an operation in place writes into an activation")


for _name in (
    "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__neg__", "__matmul__", "__rmatmul__",
    "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__iter__", "__getitem__",
):  # fmt: skip
    setattr(ChannelPart, _name, _operator(_name))
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


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name; none for a function that is not in `_ARGUMENTS`."""
    return {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs} if func in _ARGUMENTS else {}


def _slot(call: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Return the argument, ``weight`` or ``bias``, by which a call uses the parameter; None if it has no other form."""
    slots = [name for name, value in call.items() if value is parameter]
    return slots[0] if slots in (["weight"], ["bias"]) and call.get("max_norm") is None else None


class _Uses(TorchFunctionMode):
    """Record how each parameter is used: through `_slot`, or otherwise."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.layered: set[str] = set()
        self.otherwise: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        call = _call(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if name is None:
                continue
            if _slot(call, leaf):
                self.layered.add(name)
            elif getattr(func, "__name__", "") in _READERS or any(isinstance(t, Tensor) for t in tree_leaves(found)):
                self.otherwise.add(name)
        return found


def layered_parameters(call: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> tuple[Tensor, set[str]]:
    """Return the result of a call, and the parameters that it uses only as weights or biases of layers.

    The outputs of these layers can be changed instead. A weight that is also in a regularization term, tied to another
    layer or computed with otherwise is not among them.
    """
    with _Uses(parameters) as uses:
        found = call()
    return found, uses.layered - uses.otherwise


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
        self._parameter, self._index, self._amount, self._row = parameter, index, amount, row

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = _call(func, args, kwargs)
        slot = _slot(call, self._parameter)
        if slot is None:
            return out
        weight, dims, amount = self._parameter, CONVOLUTIONS.get(func, 0), self._amount.to(out.dtype)
        dim = out.ndim - 1 - dims

        def one_hot(index: Tensor) -> Tensor:
            hot = torch.arange(out.shape[dim], device=out.device) == index
            return hot.to(out.dtype).view(-1, *(1,) * dims)

        if slot == "bias":
            return out + one_hot(self._index) * amount
        row, column = self._index // weight[0].numel(), self._index % weight[0].numel()
        if func is F.embedding:
            met = call["input"] == row
            if call.get("padding_idx") is not None:  # a padding's row has no gradient in torch either
                met = met & (row != call["padding_idx"] % weight.shape[0])
            return torch.addcmul(out, met.unsqueeze(-1).to(out.dtype) * amount, one_hot(column))
        if dims:
            seen = _seen(call, weight, self._index, tuple(out.shape[-dims:])).to(out.dtype).unsqueeze(-dims - 1)
        else:
            seen = call["input"].index_select(-1, column.view(1)).to(out.dtype)
        if self._row is not None and (not dims or dim == 1):
            return ChannelPart(out, out.narrow(dim, self._row, 1) + seen * amount, self._row, dim)
        return torch.addcmul(out, seen * amount, one_hot(row))


def _seen(call: Mapping[str, Any], weight: Tensor, index: Tensor, out: tuple[int, ...]) -> Tensor:
    """Return what one element of a convolution's weight is multiplied with: (B, *out), or without B."""
    dims, kernel, groups = len(out), weight.shape[2:], int(call.get("groups", 1))

    def each(name: str, default: int) -> tuple[int, ...]:
        value = call.get(name, default)
        value = (value,) * dims if isinstance(value, int) else tuple(value)
        return value * dims if len(value) == 1 else value

    stride, dilation = each("stride", 1), each("dilation", 1)
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
        starts = map(operator.mul, place, dilation)
        cut = (slice(a, a + (o - 1) * s + 1, s) for a, s, o in zip(starts, stride, out, strict=True))
        views.append(x[(..., *cut)].movedim(-dims - 1, 0))
    # The element's place in the kernel, and its channel of the input.
    size = math.prod(kernel)
    group = index // (size * weight.shape[1]) // (weight.shape[0] // groups)
    channel = group * weight.shape[1] + index // size % weight.shape[1]
    return torch.cat(views).index_select(0, (index % size * groups * weight.shape[1] + channel).view(1)).squeeze(0)
