"""Losses under changes of single elements of parameters, many changes at once.

A weight of a linear layer, a convolution or an embedding reaches the loss through one channel of the layer's output. So
its change can be added there, and under `torch.func.vmap` everything before the layer, and the layer itself, is
computed once for all changes instead of once for each.

Shapes: P elements of a parameter, K changes; indices (K,) int64 in 0..P-1 of the flattened parameter, amounts (K,).
Layer input x, output y; linear: x (..., I), y (..., O), weight (O, I); convolution of d dimensions: x (B, I, *in),
y (B, O, *out), weight (O, I / groups, *kernel); embedding: x (...) int64, y (..., E), weight (V, E).
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainables.errors import UserError
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.gradient_method import Loss, ModelLoss
from trainables.gradients.layer_calls import CONVOLUTIONS, convolution_sizes, named_arguments

#: Bytes that one chunk of changes may take, unless told.
MEMORY_BYTES = 256 * 2**20
#: Tensors as large as the largest one that live at the same time in a forward pass without gradients.
_ALIVE = 4


class _Largest(TorchDispatchMode):
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
        memory_bytes: bound on the memory of the changes that are evaluated at once, as estimated from the largest
            tensor of one change. Shapes alone decide how many they are, so a run repeats bit for bit.
        meter: counts FLOPs; None counts nothing.
        key: what else the FLOPs depend on, such as the shapes of the batch.
        like: an instance for the same loss on another batch; its checks are used again.

    UserError: a loss that is no scalar tensor or does not repeat.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        *,
        memory_bytes: int = MEMORY_BYTES,
        meter: FlopMeter | None = None,
        key: Hashable = (),
        like: Perturbations | None = None,
    ) -> None:
        self.model = model
        self._loss = ModelLoss(loss, model)
        self._parameters = dict(model.named_parameters())
        self._memory_bytes, self._meter, self._key = memory_bytes, meter, key
        self.dtype: torch.dtype = self._loss.check_repeats().dtype if like is None else like.dtype  # dtype of the loss
        self._one_by_one: bool = like is not None and like._one_by_one
        self._sizes: dict[Hashable, int] = {} if like is None else like._sizes
        # How the loss uses the parameters is seen for each loss anew: it may regularize by now.
        with _Uses(self._parameters) as uses, self._counted("value"):
            self.value: Tensor = self._loss.value()  # loss of the model as it is, ()
        self._at_outputs = uses.layered - uses.otherwise

    def losses(
        self, name: str, indices: Tensor, amounts: Tensor, advance: Callable[[int], object] = lambda count: None
    ) -> Tensor:
        """Return the losses with ``amounts[k]`` added to element ``indices[k]`` of a parameter, (K,).

        After each chunk, ``advance`` is told how many were evaluated.
        """
        indices, amounts = indices.to(self._loss.device), amounts.to(self._loss.device)
        found = []
        most = self._most(name)
        for some, added in zip(indices.split(most), amounts.split(most), strict=True):
            with self._counted((name, len(some))):
                found.append(self._run(name, some, added))
            advance(len(some))
        return torch.cat(found) if found else amounts.new_empty(0, dtype=self.dtype)

    def together(self, changes: Mapping[str, Tensor]) -> Tensor:
        """Return the loss with tensors added to parameters, in these parameters' own dtype, ()."""
        changed = {name: self._parameters[name].detach() + change for name, change in changes.items()}
        with self._counted("value"), self._loss.evaluating():
            return self._loss.at(changed)

    def _counted(self, what: Hashable) -> AbstractContextManager[None]:
        return nullcontext() if self._meter is None else self._meter.forward((self._key, what))

    def _most(self, name: str) -> int:
        """Return the largest power of two of changes whose tensors fit in the memory bound, at least 1."""
        key = (name, self._key)
        if key not in self._sizes:
            two = torch.zeros(2, dtype=torch.int64, device=self._loss.device)
            with _Largest() as largest:
                self._run(name, two, torch.zeros(2, dtype=self.dtype, device=two.device))
            each = max(1, largest.nbytes // 2) * _ALIVE
            self._sizes[key] = 1 << max(0, (self._memory_bytes // each).bit_length() - 1)
        return self._sizes[key]

    def _run(self, name: str, indices: Tensor, amounts: Tensor) -> Tensor:
        changed = self._function(name)
        if not self._one_by_one:
            try:
                with self._loss.evaluating():
                    return vmap(changed, randomness="same")(indices, amounts)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, (torch.OutOfMemoryError, UserError)):
                    raise
                self._one_by_one = True
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    "the loss cannot be evaluated for many weights at once, so it is evaluated for one after the "
                    f"other: torch.func.vmap says {reason!r}",
                    stacklevel=2,
                )
        found = []
        for index, amount in zip(indices, amounts, strict=True):
            with self._loss.evaluating():  # for each, so that all begin with the same states of the generators
                found.append(changed(index, amount))
        return torch.stack(found)

    def _function(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss as a function of a flat index and of what is added there."""
        parameter = self._parameters[name]

        def at_output(index: Tensor, amount: Tensor) -> Tensor:
            with _ChangedOutput(parameter, index, amount):
                return self._loss.at({})

        flat = parameter.detach().reshape(-1)
        places = torch.arange(flat.numel(), device=flat.device)

        def in_place(index: Tensor, amount: Tensor) -> Tensor:
            changed = torch.where(places == index, flat + amount.to(flat.dtype), flat)
            return self._loss.at({name: changed.view(parameter.shape)})

        return at_output if name in self._at_outputs else in_place


#: Functions that return a tensor's numbers as something else.
_READERS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__", "__deepcopy__")


def _slot(func: Any, call: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Return the argument, ``weight`` or ``bias``, by which alone a call uses the parameter; None for other uses."""
    if func is F.batch_norm or (func in CONVOLUTIONS and convolution_sizes(func, call) is None):
        return None
    slots = [name for name, value in call.items() if value is parameter]
    return slots[0] if slots in (["weight"], ["bias"]) and call.get("max_norm") is None else None


class _Uses(TorchFunctionMode):
    """Record how each parameter is used: only as weight or bias of layers, whose outputs can be changed, or otherwise.

    Otherwise used is a weight that is also in a regularization term, tied to another layer, or computed with.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.layered: set[str] = set()
        self.otherwise: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        call = named_arguments(func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if name is None:
                continue
            if _slot(func, call, leaf):
                self.layered.add(name)
            elif getattr(func, "__name__", "") in _READERS or any(isinstance(t, Tensor) for t in tree_leaves(found)):
                self.otherwise.add(name)
        return found


class _ChangedOutput(TorchFunctionMode):
    """Add to the outputs of layers what an amount () does that is added to one element of the parameter they use.

    The element's flat index is () int64.
    """

    def __init__(self, parameter: Tensor, index: Tensor, amount: Tensor) -> None:
        super().__init__()
        self._parameter, self._index, self._amount = parameter, index, amount

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = named_arguments(func, args, kwargs)
        slot = _slot(func, call, self._parameter)
        if slot is None:
            return out
        weight, dims, amount = self._parameter, CONVOLUTIONS.get(func, 0), self._amount.to(out.dtype)

        def one_hot(index: Tensor) -> Tensor:
            hot = torch.arange(out.shape[out.ndim - 1 - dims], device=out.device) == index
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
            seen = _seen(func, call, weight, self._index, tuple(out.shape[2:])).unsqueeze(1)
        else:
            seen = call["input"].index_select(-1, column.view(1))
        return torch.addcmul(out, seen.to(out.dtype) * amount, one_hot(row))


def _seen(func: Any, call: Mapping[str, Any], weight: Tensor, index: Tensor, out: tuple[int, ...]) -> Tensor:
    """Return what one element of a convolution's weight is multiplied with: (B, *out)."""
    sizes = convolution_sizes(func, call)
    assert sizes is not None
    stride, padding, dilation, groups = sizes
    x = F.pad(call["input"], [side for size in reversed(padding) for side in (size, size)])
    kernel = weight.shape[2:]
    views = []
    for place in product(*map(range, kernel)):
        starts = map(operator.mul, place, dilation)
        cut = tuple(slice(a, a + (o - 1) * s + 1, s) for a, s, o in zip(starts, stride, out, strict=True))
        views.append(x.movedim(1, 0)[(slice(None), slice(None), *cut)])
    # The element's place in the kernel, and its channel of the input.
    size = math.prod(kernel)
    group = index // (size * weight.shape[1]) // (weight.shape[0] // groups)
    channel = group * weight.shape[1] + index // size % weight.shape[1]
    return torch.cat(views).index_select(0, (index % size * groups * weight.shape[1] + channel).view(1)).squeeze(0)
