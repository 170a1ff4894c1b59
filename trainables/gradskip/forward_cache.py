"""Forward cache: the outputs of a fully stopped prefix are computed once per sample and then read from a file.

The file holds rows of tensors by sample number, memory-mapped and of limited size.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from trainables.errors import UserError
from trainables.gradskip.layers import unwrap
from trainables.gradskip.prefix_cuts import Cut, cuts_of, may_end_prefix
from trainables.workloads.batch_structure import tensors_in


class RowFile:
    """File of at most ``budget_bytes`` of rows by sample number 0..S-1; the first rows put are kept."""

    def __init__(self, *, samples: int, budget_bytes: int, folder: str | Path | None = None) -> None:
        self._samples = samples
        self._budget_bytes = budget_bytes
        self._folder = folder
        self._slots = torch.full((samples,), -1, dtype=torch.int64)  # (S,) row of the file, -1: none
        self.checksums = torch.zeros(samples, dtype=torch.int64)  # (S,) of the inputs that the rows were computed from
        self._filled = 0
        self._file: IO[bytes] | None = None
        self._rows: Tensor | None = None  # (capacity, *row), mapped
        self.capacity: int | None = None  # rows that fit; None until the first row gives the row size

    @property
    def bytes(self) -> int:
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    @property
    def room(self) -> int:
        """Return the number of rows that can still be put; before the first row, the number of samples."""
        return (self._samples if self.capacity is None else self.capacity) - self._filled

    def held(self, indices: Tensor) -> Tensor:
        """Return which of these samples have a row: (B,) bool."""
        return self._slots[indices] >= 0

    def get(self, indices: Tensor) -> Tensor:
        """Return a copy of these samples' rows, (B, *row), on the CPU; each sample must have one."""
        assert self._rows is not None
        return self._rows.index_select(0, self._slots[indices])

    def put(self, indices: Tensor, rows: Tensor, checksums: Tensor) -> None:
        """Store the rows of samples that have none, as many as fit; OSError where the folder cannot hold the file."""
        if self.capacity is None:
            self._open(rows)
        # A sampler that draws with replacement may give a sample twice; its first row is kept.
        first = np.sort(np.unique(indices.numpy(), return_index=True)[1])[: self.room]
        if self._rows is None or len(first) == 0:
            return
        chosen = torch.from_numpy(first)
        slots = torch.arange(self._filled, self._filled + len(first))
        self._rows[slots] = rows.detach()[chosen.to(rows.device)].cpu()
        self.checksums[indices[chosen]] = checksums.cpu()[chosen]
        self._slots[indices[chosen]] = slots  # last, so that a row counts as held only once it is complete
        self._filled += len(first)

    def close(self) -> None:
        """Drop all rows and free the disk space."""
        self._slots.fill_(-1)
        self._filled, self._rows, self.capacity = 0, None, None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, rows: Tensor) -> None:
        row_bytes = rows[0].numel() * rows.element_size()
        self.capacity = min(self._samples, self._budget_bytes // row_bytes)
        if self.capacity == 0:
            return
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by close()
        size = self.capacity * row_bytes
        if hasattr(os, "posix_fallocate"):
            # A full disk is an error here rather than a signal that kills the process at a later write.
            os.posix_fallocate(self._file.fileno(), 0, size)
        else:
            self._file.truncate(size)
        mapped = torch.from_numpy(np.memmap(self._file, dtype=np.uint8, mode="r+", shape=(size,)))
        self._rows = mapped.view(rows.dtype).view(self.capacity, *rows.shape[1:])


def row_checksums(rows: Tensor) -> Tensor:
    """Compute a checksum of each row's bits: (B, ...) of any dtype to (B,) int64, on the same device.

    The bits are read as integers and multiplied by fixed pseudo-random odd numbers, modulo 2^64. Integer sums do
    not depend on their order, so equal rows have equal checksums in every batch and on every device, and one changed
    element always changes it.
    """
    size = min(rows.element_size(), 8)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = rows.detach().reshape(len(rows), -1).contiguous().view(kind)
    factors = _factors(bits.shape[1], rows.device)
    at_once = max(1, 2**22 // max(1, bits.shape[1]))  # 32 MB of int64, for any batch size
    return torch.cat([(part.to(torch.int64) * factors).sum(1) for part in bits.split(at_once)])


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)


# --- One forward pass through a stopped prefix, some rows of which are in a forward cache ----------------------------
# Shapes: B rows of the batch, M of them missing from the cache; x (B, ...) the model's input; indices (B,) int64.
#
# During the pass the ``forward`` of the prefix's modules m_0..m_k is replaced, as `PrefixPass` says; m_k returns the
# cached rows, or assembles the batch.

#: Allowed rounding difference between rows computed in two batches, relative to the largest output.
_TOLERANCE = 1e-3


class PassReport(NamedTuple):
    """Report of one forward pass through the prefix: names of its modules, and rows of the batch."""

    modules: tuple[str, ...]
    rows: int
    computed: int  # rows that the prefix was actually computed on: misses, the copy of a single row, and checks


@dataclass(frozen=True)
class _Shape:
    """Shape and kind of an output, for a tensor that takes its place where nobody reads its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)  # it may be written into


class PrefixPass:
    """One forward pass; used once, by `ForwardCache.batch`.

    Modules of a chain run on the missing rows alone. Of others, which may take more than the rows, the whole batch is
    computed where one is missing, and where none is they return tensors of the shape of their output.
    """

    def __init__(self, cache: ForwardCache, cut: Cut, indices: Tensor) -> None:
        self._cache, self._cut, self._indices = cache, cut, indices
        self._originals: dict[nn.Module, Callable[..., Any]] = {}
        self._position = 0  # of the module that runs next
        self._previous: Any = None
        self._given: list[Tensor] = []  # inputs of the model
        self._untouched = False
        self._computing = False
        self._computed = 0

    @contextmanager
    def running(self) -> Iterator[PrefixPass]:
        """Replace `forward` of the prefix's modules inside the block."""
        before = {module: module.__dict__.get("forward") for module in self._cut.modules}
        # Importing the compiler takes seconds, so it is disabled only where the model is compiled.
        visit = torch.compiler.disable(self._visit) if self._cache.compiled else self._visit
        hooks: list[RemovableHandle] = []
        try:
            for module in before:
                self._originals[module] = module.forward
                module.forward = partial(visit, module)
            if not (self._cut.is_chain or self._cache.compiled):  # a hook would have it compiled again
                hooks.append(self._cache.model.register_forward_pre_hook(self._take_inputs, with_kwargs=True))
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            for module, own in before.items():
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.forward = own

    def _take_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = [*tensors_in((args, kwargs))]

    def report(self) -> PassReport | None:
        """Return the report of this pass; None where the cache was not used. UserError after a part of the prefix."""
        if 0 < self._position < len(self._cut.modules) and not self._untouched:
            raise self._wrong_order(f"ended before {self._cut.names[self._position]!r}")
        if self._position == 0 or (self._untouched and self._computed == 0):
            return None
        return PassReport(self._cut.names, rows=len(self._indices), computed=self._computed)

    def _visit(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._untouched or self._computing:
            return self._originals[module](*args, **kwargs)
        cut, position = self._cut, self._position
        if position == len(cut.modules):  # a module that is used again after the prefix
            if module is cut.modules[0] and cut.first_runs_once:
                raise self._wrong_order("ran twice inside one batch()")
            return self._originals[module](*args, **kwargs)
        if module is not cut.modules[position]:
            raise self._wrong_order(f"ran {cut.names[cut.modules.index(module)]!r}")
        if cut.is_chain:
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                raise self._wrong_order(f"gave {cut.names[position]!r} other arguments than one tensor")
            if position > 0 and not _same(args[0], self._previous):
                raise self._wrong_order(f"gave {cut.names[position]!r} another input than the output before it")
        if position == 0:
            given = self._given or [*tensors_in((args, kwargs))]
            self._begin([t for t in given if t.dim() and len(t) == len(self._indices)], args)
            if self._untouched:
                return self._originals[module](*args, **kwargs)
            args = (self._rows,) if cut.is_chain else args
        self._position += 1
        if self._runs:
            y = self._compute(module, *args, **kwargs)
            if not cut.is_chain:
                shapes = tree_map_only(Tensor, lambda t: _Shape(t.shape, t.dtype, t.device), y)
                self._cache.shapes[len(self._rows), position] = shapes
        elif cut.is_chain:
            y = args[0]
        else:
            shapes = self._cache.shapes[len(self._indices), position]
            y = tree_map_only(_Shape, _Shape.tensor, shapes)
        if self._position == len(cut.modules):
            y = self._finish(y)
        self._previous = y
        return y

    def _begin(self, inputs: list[Tensor], args: tuple[Any, ...]) -> None:
        """Select the rows to compute, of inputs (B, ...): in a chain those missing from the cache, at least two."""
        cache = self._cache
        if not inputs:
            got = f" for shape {tuple(args[0].shape)}" if args and isinstance(args[0], Tensor) else ""
            reason = f"there must be one index a row of the model's input, got {len(self._indices)} indices{got}"
            if not self._cut.is_chain:
                return self._give_up(reason)
            raise UserError(f"forward cache: {reason}")
        x = inputs[0]
        autocast = "on" if torch.is_autocast_enabled(x.device.type) else "off"
        kind = f"rows of shape {tuple(x.shape[1:])}, {x.dtype}, {x.device}, autocast {autocast}"
        cache.input_kind = cache.input_kind or kind
        held = cache.rows.held(self._indices)
        if len(x) == 0:
            self._untouched = True
        elif cache.input_kind != kind:
            self._give_up(f"inputs must be alike, got {kind} after {cache.input_kind}")
        elif bool(held.any()):
            self._verify(inputs, held)
        if self._untouched:
            return
        self._held = held
        self._missing = (~held).nonzero()[:, 0]
        missing = len(self._missing)
        cache.hits += len(x) - missing
        cache.misses += missing
        self._input = self._rows = x
        if self._cut.is_chain and missing not in (0, len(x)):
            self._rows = x[self._missing.to(x.device)]
        if self._cut.is_chain and missing == 1:
            self._rows = torch.cat([self._rows[:1], self._rows[:1]])  # kernels for a single row round differently
        due = (cache.hit_batches - 1) % COMPUTE_EVERY == 0 or (len(x), 0) not in cache.shapes
        self._runs = missing > 0 or (due and not self._cut.is_chain)
        self._computed += len(self._rows) if self._runs else 0
        # Computed before the prefix runs, because its first module may work in place.
        self._checksums = _checksums(inputs, self._missing) if missing and cache.rows.room else None

    def _verify(self, inputs: list[Tensor], held: Tensor) -> None:
        cache = self._cache
        due = cache.hit_batches % VERIFY_EVERY == 0
        cache.hit_batches += 1
        if not due:
            return
        known = self._indices[held]
        wrong = _checksums(inputs, held.nonzero()[:, 0]).cpu() != cache.rows.checksums[known]
        if wrong.any():
            self._give_up(
                f"inputs must repeat, but sample {int(known[wrong][0])} came with other values than before: "
                "augmentation, or sample numbers that do not belong to the rows"
            )

    def _finish(self, y: Any) -> Tensor:
        """Combine cached and computed rows: (M, ...) computed, or anything where M = 0, to (B, ...)."""
        rows, missing = self._cache.rows, self._missing
        if not self._runs:
            return self._laid_out(rows.get(self._indices).to(self._input.device, non_blocking=True))
        if not isinstance(y, Tensor) or y.dim() < 1 or len(y) != len(self._rows):
            raise self._wrong_order(f"got no row a sample from {self._cut.names[-1]!r}")
        if not self._is_repeated(y):
            self._give_up(
                "the prefix must compute each sample by itself and the same each time: it has a norm without running "
                "statistics, or draws random numbers in eval mode"
            )
            if not self._cut.is_chain:
                return y
            self._computed += len(self._input)
            y = self._input
            for module in self._cut.modules:  # as without a cache
                y = self._originals[module](y)
            return y
        if not self._cut.is_chain:
            if len(missing):
                self._keep(y[missing.to(y.device)])
            return self._laid_out(y)
        y = y[: len(missing)]
        self._keep(y)
        if len(missing) == len(self._held):
            return self._laid_out(y)
        whole = torch.empty((len(self._held), *y.shape[1:]), dtype=y.dtype, device=y.device)
        whole[self._held.nonzero()[:, 0].to(y.device)] = rows.get(self._indices[self._held]).to(y.device)
        whole[missing.to(y.device)] = y
        return self._laid_out(whole)

    def _keep(self, y: Tensor) -> None:
        cache, indices = self._cache, self._indices[self._missing]
        channels_last = not y.is_contiguous() and y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last)
        cache.channels_last = channels_last
        if self._checksums is None:
            return
        first = cache.rows.capacity is None
        try:
            cache.rows.put(indices, y, self._checksums)
        except OSError as error:
            cache.switch_off(f"no room for its file: {error}; give another folder or a smaller budget")
            return
        if first and cache.rows.capacity == 0:
            size = y[0].numel() * y.element_size()
            warnings.warn(f"forward cache holds nothing: its budget must be a row, {size} bytes, or more", stacklevel=2)

    def _laid_out(self, y: Tensor) -> Tensor:
        # Always the same strides, because later modules may choose kernels, and thus rounding, by them.
        return y.contiguous(memory_format=torch.channels_last if self._cache.channels_last else torch.contiguous_format)

    def _compute(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._computing = True
        try:
            with torch.no_grad(), _evaluating(module):
                return self._originals[module](*args, **kwargs)
        finally:
            self._computing = False

    def _is_repeated(self, y: Tensor) -> bool:
        """Return whether rows are what they were, or in a chain the same without each second one beside them."""
        cache, held = self._cache, self._held
        if not self._cut.is_chain:
            before = cache.rows.get(self._indices[held]).to(y.device) if bool(held.any()) else y[:0]
            return _is_close(y[held.to(y.device)], before)
        if not cache.stands_alone and len(self._rows) > 1:
            alone: Any = self._rows[::2]
            self._computed += len(alone)
            for module in self._cut.modules:
                alone = self._compute(module, alone)
            cache.stands_alone = _is_close(y[::2], alone)
            return cache.stands_alone
        return True

    def _give_up(self, reason: str) -> None:
        self._untouched = True
        self._cache.switch_off(reason)

    def _wrong_order(self, what: str) -> UserError:
        if not self._cut.is_chain:
            return UserError(
                f"forward cache: the model must run its modules in the same order in each step, but it {what}: leave "
                "the forward cache out"
            )
        return UserError(
            f"forward cache: the model must run the chain's modules one after the other, but it {what}: give the chain "
            f"that it runs (this one begins {', '.join(self._cut.names[:4])})"
        )


def _checksums(inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return one checksum a row over all inputs (B, ...): (M,) int64 for the M numbers of rows."""
    found = [row_checksums(x if len(rows) == len(x) else x[rows.to(x.device)]) for x in inputs]
    return torch.stack([(2 * place + 1) * found[place] for place in range(len(found))]).sum(0)


def _is_close(y: Tensor, other: Tensor) -> bool:
    scale = float(y.abs().max()) if y.numel() else 0.0
    return torch.allclose(other, y, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)


def _same(x: Tensor, previous: Tensor | None) -> bool:
    # A hook may pass on a detached tensor or a view with the same values.
    return previous is not None and (
        x is previous
        or (x.shape == previous.shape and x.stride() == previous.stride() and x.data_ptr() == previous.data_ptr())
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module and its submodules into eval mode inside the block, and restore each one's own mode."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


# --- Forward cache ----------------------------------------------------------------------------------------------------
# Shapes: S samples in the training set; B rows of a batch; indices (B,) int64, the sample number of each row.
#
# A prefix consists of what runs before a cut (`prefix_cuts`), and none of its parameters needs a gradient. Its outputs
# depend on the input alone once its norms use their running statistics and its dropout is off, so both are in eval mode
# here, whether a row is computed or read: a sample's output never depends on its batch or on the cache's content. This
# differs from training without the cache, where a stopped batch norm still uses the batch's statistics.
#
# **Rows read equal rows computed, bit for bit**, wherever a kernel's result for a row does not depend on the number of
# rows. On the CPU (torch 2.13, oneDNN; convolutions of 8 to 128 channels, linear layers, 1 to 599 rows) only the result
# for a single row differed, so a single row is computed as two. On CUDA the last bits may differ.
#
# Limits: a Python number that a module of the prefix keeps for a later one stays as it was last computed; an input that
# begins to vary is noticed within `VERIFY_EVERY` batches, not at once; hooks on the prefix's modules except the last
# receive the model's input instead of activations when all rows are read.

#: Inputs are checked in every so many-th batch with hits, starting with the first.
VERIFY_EVERY = 16
#: Where the cut was recorded, outputs are computed again and compared in every so many-th batch with hits.
COMPUTE_EVERY = 64


class ForwardCache:
    """Cache of a model's stopped-prefix outputs by sample, limited to a number of bytes.

        with ForwardCache(model, samples=len(dataset), budget_bytes=10**9) as cache:
            for indices, images, labels in loader:
                with cache.batch(indices):
                    loss = loss_fn(model(images), labels)
                loss.backward()

    The cache does nothing while nothing is stopped, in eval mode, or without gradients. It detects stops by itself, and
    starts anew when the prefix grows or when its weights or running statistics change.

    Args:
        model: may be wrapped by DistributedDataParallel or torch.compile.
        samples: S; sample numbers are 0..S-1.
        budget_bytes: maximum file size in bytes, >= 0; the first samples seen are kept, the others always computed.
            Another 16 bytes per sample are kept in memory.
        folder: folder of the file; None: the system's folder for temporary files (often in memory: /tmp).
        forward: runs the model that it is given on a batch; with it, a forward pass of a copy shows what can be kept.
            Not needed for an nn.Sequential.
        chain: modules in execution order: the only input of the first is the model's input, the only input of each
            other module is the output of the one before, and only the last output is used elsewhere. None: the children
            of an nn.Sequential, nested ones included, or what ``forward`` shows.

    Raises:
        UserError: an argument out of range, a folder that does not exist, or a model that needs ``forward``, or of
            which nothing can be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int,
        budget_bytes: int,
        folder: str | Path | None = None,
        forward: Callable[[nn.Module], Any] | None = None,
        chain: Sequence[nn.Module] | None = None,
    ) -> None:
        for name, value, low in (("samples", samples, 1), ("budget_bytes", budget_bytes, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UserError(f"forward cache: {name} must be an integer >= {low}, got {value!r}")
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"forward cache: folder must be a folder that exists, got {str(folder)!r}: create it")
        if any(isinstance(part, nn.DataParallel) for part in model.modules()):
            raise UserError(
                "forward cache: the model must not be in DataParallel, which runs copies of it: use "
                "DistributedDataParallel"
            )
        self.model = unwrap(model)
        self.cuts = cuts_of(self.model, chain, forward)
        self.samples = samples
        self.rows = RowFile(samples=samples, budget_bytes=budget_bytes, folder=folder)
        self.last: PassReport | None = None  # report of the last `batch`; None: the model ran without the cache
        self.compiled = any(hasattr(part, "_orig_mod") for part in model.modules())
        self.enabled = True  # permanently False after `switch_off` or `close`
        self.cached_through = -1  # place among the cuts of the one whose outputs are kept; -1 for none
        self.hits = 0  # rows read so far
        self.misses = 0  # rows computed so far because they were not in the cache
        # Since the cache last started anew: batches with hits, what an input row is in words, whether the prefix was
        # found to compute each row by itself, and whether its outputs have the channels-last layout.
        self.hit_batches, self.input_kind, self.stands_alone, self.channels_last = 0, "", False, False
        self.shapes: dict[tuple[int, int], Any] = {}  # of what modules before a recorded cut return, by rows and place
        # Modules and other parameters of each cut that those before it do not have; the modules' own may be replaced.
        self._parts: list[list[nn.Module]] = []
        self._beside: list[list[Tensor]] = []
        seen: set[int] = set()
        for cut in self.cuts:
            parts = {id(part): part for module in cut.modules for part in module.modules()}
            inside = {id(p) for part in parts.values() for p in part._parameters.values()}
            beside = {id(p): p for p in cut.parameters if id(p) not in inside}
            self._parts.append([part for key, part in parts.items() if key not in seen])
            self._beside.append([p for key, p in beside.items() if key not in seen])
            seen |= {*parts, *beside}
        self._state: tuple[tuple[int, int], ...] = ()
        self._inside = False

    def switch_off(self, reason: str) -> None:
        """Close the cache permanently and warn with the reason."""
        self.close()
        warnings.warn(f"forward cache off: {reason}", stacklevel=2)

    def close(self) -> None:
        """Drop all rows and free the disk space; from here on the model runs without the cache."""
        self.enabled = False
        self.cached_through = -1
        self.rows.close()

    def __enter__(self) -> ForwardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        return self.rows.bytes

    def update(self) -> None:
        """Find the stopped prefix, and start anew where it or its weights changed; `batch` calls this."""
        if not self.enabled:
            return
        through = self._stopped_through()
        # Versions count in-place changes: a loaded checkpoint, or a published optimizer's momentum on stopped layers.
        state = tuple(
            (id(tensor), tensor._version)
            for parts, beside in zip(self._parts[: through + 1], self._beside, strict=False)
            for tensor in (
                *beside,
                *(t for part in parts for t in (*part._parameters.values(), *part._buffers.values())),
            )
            if tensor is not None
        )
        if through == self.cached_through and state == self._state:
            return
        self.rows.close()
        self.cached_through, self._state = through, state
        self.hit_batches, self.input_kind, self.stands_alone = 0, "", False
        self.shapes.clear()

    def _stopped_through(self) -> int:
        last = -1
        for place, (parts, beside) in enumerate(zip(self._parts, self._beside, strict=True)):
            parameters = [p for part in parts for p in part._parameters.values() if p is not None] + beside
            if any(parameter.requires_grad for parameter in parameters):
                break
            if parameters:
                last = place
        if last < 0:
            return -1
        # None of these enlarges its input, so the last one has the smallest outputs and saves the most.
        while last + 1 < len(self.cuts):
            here, further = self.cuts[last].modules, self.cuts[last + 1].modules
            if further[:-1] != here or not may_end_prefix(further[-1]):
                break
            last += 1
        return last

    @contextmanager
    def batch(self, indices: Tensor) -> Iterator[None]:
        """Run one training forward pass that reads cached rows, and computes and stores the others.

        ``indices`` are (B,) int64 on the CPU, the sample number of each row of the model's input. UserError for others,
        or a model that does not run the chain in its order.
        """
        self._check(indices)
        if self._inside:
            raise UserError("forward cache: batch() was entered inside another one: use one a forward pass")
        self.last = None
        self.update()
        if not self.enabled or self.cached_through < 0 or not self.model.training or not torch.is_grad_enabled():
            yield
            return
        self._inside = True
        try:
            with PrefixPass(self, self.cuts[self.cached_through], indices).running() as prefix_pass:
                yield
            self.last = prefix_pass.report()
        finally:
            self._inside = False

    def _check(self, indices: Tensor) -> None:
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.dim() != 1:
            found = f"{indices.dtype} of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else indices
            raise UserError(f"forward cache: indices must be a 1-D int64 tensor of sample numbers, got {found}")
        if indices.device.type != "cpu":
            raise UserError(f"forward cache: indices must be on the CPU, got {indices.device}: take them before .to()")
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.samples):
            raise UserError(
                f"forward cache: indices must be in 0..{self.samples - 1} (samples={self.samples}), "
                f"got {int(indices.min())}..{int(indices.max())}"
            )
