"""One forward pass through a stopped prefix, some rows of which are in a forward cache.

Shapes: B rows of the batch, M of them missing from the cache; x (B, ...) the model's input; indices (B,) int64.

During the pass the ``forward`` of the prefix's modules is replaced. If all rows are cached, m_0..m_{k-1} return their
input and m_k returns the cached rows; otherwise they run on the missing rows alone, and m_k assembles the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip.forward_cache.row_file import RowFile, row_checksums

#: Allowed rounding difference between rows computed in two batches, relative to the largest output.
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """Report of one forward pass through the prefix."""

    modules: tuple[str, ...]
    """Names of m_0..m_k."""
    rows: int
    """Rows of the batch."""
    computed: int
    """Rows that the prefix was actually computed on: misses, the copy of a single row, and checks."""


class PrefixCache:
    """State of the cache of a model's prefix that a pass reads and changes; base of `cache.ForwardCache`."""

    chain: list[nn.Module]
    names: list[str]
    rows: RowFile
    verify_every: int
    compiled: bool
    """True if the model or a part of it is compiled by torch.compile."""
    enabled = True
    """Permanently False after `switch_off` or `close`."""
    cached_through = -1
    """k, the index in the chain of the module whose outputs are kept; -1 for none."""
    hits = 0
    """Rows read so far."""
    misses = 0
    """Rows computed so far because they were not in the cache."""
    hit_batches = 0
    """Batches with hits since the cache last started anew."""
    input_kind: Any = None
    """Shape, dtype, device and autocast state of an input row, set by the first `PrefixPass`."""
    stands_alone = False
    """True if the prefix was found to compute each row independently."""
    channels_last = False
    """True if the outputs have the channels-last memory layout."""

    def switch_off(self, reason: str) -> None:
        """Close the cache permanently and warn with the reason."""
        self.close()
        self.say(f"off: {reason}")

    def say(self, what: str) -> None:
        """Warn with this message."""
        warnings.warn(f"forward cache {what}", stacklevel=2)

    def close(self) -> None:
        """Drop all rows and free the disk space; from here on the model runs without the cache."""
        self.enabled = False
        self.cached_through = -1
        self.rows.close()


class PrefixPass:
    """State of one forward pass; used once, by `ForwardCache.batch`."""

    def __init__(self, cache: PrefixCache, indices: Tensor) -> None:
        self._cache = cache
        self._indices = indices
        self._modules = cache.chain[: cache.cached_through + 1]
        self._names = cache.names[: cache.cached_through + 1]
        self._originals: dict[nn.Module, Callable[..., Any]] = {}
        self._position = 0  # in the chain, of the module that runs next
        self._previous: Tensor | None = None
        self._untouched = False
        self._computed = 0

    @contextmanager
    def running(self) -> Iterator[PrefixPass]:
        """Replace `forward` of the prefix modules inside the block and restore it afterwards."""
        before = {module: module.__dict__.get("forward") for module in self._modules}
        # Importing the compiler takes seconds, so it is disabled only where the model is compiled.
        visit = torch.compiler.disable(self._visit) if self._cache.compiled else self._visit
        try:
            for module in before:
                self._originals[module] = module.forward
                module.forward = partial(visit, module)
            yield self
        finally:
            for module, own in before.items():
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.forward = own

    def check_finished(self) -> None:
        """Raise UserError if the model ran only a part of the prefix."""
        if 0 < self._position < len(self._modules) and not self._untouched:
            raise self._wrong_chain(f"ended before {self._names[self._position]!r}")

    def report(self) -> PassReport | None:
        """Return the report of this pass; None if the model ran without the cache, or not at all."""
        if self._position == 0 or (self._untouched and self._computed == 0):
            return None
        return PassReport(modules=tuple(self._names), rows=len(self._indices), computed=self._computed)

    def _visit(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._untouched:
            return self._originals[module](*args, **kwargs)
        position = self._position
        if position == len(self._modules):
            if module is self._modules[0] and module not in self._cache.chain[position:]:
                raise self._wrong_chain("ran twice inside one batch()")
            return self._originals[module](*args, **kwargs)  # a module that is used again after the prefix
        if module is not self._modules[position]:
            raise self._wrong_chain(f"ran {self._cache.names[self._cache.chain.index(module)]!r}")
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self._wrong_chain(f"gave {self._names[position]!r} other arguments than one tensor")
        x = args[0]
        if position == 0:
            x = self._begin(x)
            if self._untouched:
                return self._originals[module](x)
        elif not _same(x, self._previous):
            raise self._wrong_chain(f"gave {self._names[position]!r} another input than the output before it")
        self._position += 1
        y = self._compute(module, x) if len(self._missing) else x
        if self._position == len(self._modules):
            y = self._finish(y)
        self._previous = y
        return y

    def _begin(self, x: Tensor) -> Tensor:
        """Select the input rows missing from the cache: (B, ...) to (M, ...), at least two rows where M > 0."""
        cache = self._cache
        if x.dim() < 1 or len(x) != len(self._indices):
            raise UserError(
                f"forward cache: there must be one index a row of the model's input, got {len(self._indices)} indices "
                f"for shape {tuple(x.shape)}"
            )
        kind = (x.shape[1:], x.dtype, x.device, torch.is_autocast_enabled(x.device.type))
        if cache.input_kind is None:
            cache.input_kind = kind
        held = cache.rows.held(self._indices)
        if len(x) == 0:
            self._untouched = True
        elif cache.input_kind != kind:
            self._give_up(f"inputs must be alike, got {_words(kind)} after {_words(cache.input_kind)}")
        elif bool(held.any()):
            self._verify(x, held)
        if self._untouched:
            return x
        self._input, self._held = x, held
        self._missing = (~held).nonzero()[:, 0]
        missing = len(self._missing)
        cache.hits += len(x) - missing
        cache.misses += missing
        self._rows = x if missing in (0, len(x)) else x[self._missing.to(x.device)]
        if missing == 1:
            self._rows = torch.cat([self._rows, self._rows])  # kernels for a single row round differently
        self._computed += len(self._rows) if missing else 0
        # Computed before the prefix runs, because its first module may work in place.
        self._checksums = row_checksums(self._rows[:missing]) if missing and cache.rows.room else None
        return self._rows

    def _verify(self, x: Tensor, held: Tensor) -> None:
        cache = self._cache
        due = cache.hit_batches % cache.verify_every == 0
        cache.hit_batches += 1
        if not due:
            return
        known = self._indices[held]
        wrong = row_checksums(x[held.to(x.device)]).cpu() != cache.rows.checksums(known)
        if wrong.any():
            self._give_up(
                f"inputs must repeat, but sample {int(known[wrong][0])} came with other values than before: "
                "augmentation, or sample numbers that do not belong to the rows"
            )

    def _finish(self, y: Any) -> Tensor:
        """Combine cached and computed rows: (M, ...) computed, or anything where M = 0, to (B, ...)."""
        rows, missing = self._cache.rows, self._missing
        if len(missing) == 0:
            return self._laid_out(rows.get(self._indices).to(self._input.device, non_blocking=True))
        if not isinstance(y, Tensor) or y.dim() < 1 or len(y) != len(self._rows):
            raise self._wrong_chain(f"got no row a sample from {self._names[-1]!r}")
        if not self._cache.stands_alone and len(self._rows) > 1 and not self._rows_stand_alone(y):
            self._give_up(
                "the prefix must compute each sample by itself and the same each time: it has a norm without running "
                "statistics, or draws random numbers in eval mode"
            )
            return self._honest()
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
            cache.say(f"holds nothing: the budget must be at least one row, {y[0].numel() * y.element_size()} bytes")

    def _laid_out(self, y: Tensor) -> Tensor:
        # Always the same strides, because later modules may choose kernels, and thus rounding, by them.
        return y.contiguous(memory_format=torch.channels_last if self._cache.channels_last else torch.contiguous_format)

    def _compute(self, module: nn.Module, x: Tensor) -> Any:
        with torch.no_grad(), _evaluating(module):
            return self._originals[module](x)

    def _rows_stand_alone(self, y: Tensor) -> bool:
        """Return whether every second row gives the same output when computed without its neighbours."""
        alone: Any = self._rows[::2]
        self._computed += len(alone)
        for module in self._modules:
            alone = self._compute(module, alone)
        together = y[::2]
        scale = float(together.abs().max()) if together.numel() else 0.0
        self._cache.stands_alone = torch.allclose(alone, together, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)
        return self._cache.stands_alone

    def _honest(self) -> Any:
        """Run the prefix on the whole batch, as without a cache."""
        self._computed += len(self._input)
        y: Any = self._input
        for module in self._modules:
            y = self._originals[module](y)
        return y

    def _give_up(self, reason: str) -> None:
        self._untouched = True
        self._cache.switch_off(reason)

    def _wrong_chain(self, what: str) -> UserError:
        return UserError(
            f"forward cache: the model must run the chain's modules one after the other, but it {what}: give the chain "
            f"that it runs (this one begins {', '.join(self._names[:4])})"
        )


def _same(x: Tensor, previous: Tensor | None) -> bool:
    # A hook may pass on a detached tensor or a view with the same values.
    return previous is not None and (
        x is previous
        or (x.shape == previous.shape and x.stride() == previous.stride() and x.data_ptr() == previous.data_ptr())
    )


def _words(kind: tuple[Any, ...]) -> str:
    shape, dtype, device, autocast = kind
    return f"rows of shape {tuple(shape)}, {dtype}, {device}, autocast {'on' if autocast else 'off'}"


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
