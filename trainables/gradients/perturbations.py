"""Losses under changes of single elements of parameters, many changes at once.

Shapes: P elements of a parameter, K changes; indices (K,) int64 in 0..P-1 of the flattened parameter, amounts (K,).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainables.errors import UserError
from trainables.gradients.model_loss import Loss, ModelLoss
from trainables.gradients.rank_one import ChangedOutput, layered_parameters
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
