"""The forward pass of a fully stopped prefix, computed once a sample and then read from a file.

Shapes: S samples in the training set; B rows of a batch; indices (B,) int64, the sample number of each row.

A prefix is the first modules m_0..m_k of a chain, none of whose parameters needs a gradient. Its outputs depend on
the input alone once its norms use their running statistics and its dropout is off, so both are in eval mode here,
whether a row is computed or read: a sample's output never depends on its batch or on what the cache holds. This is
another training than without the cache, where a stopped batch norm goes on with the batch's statistics. Running
statistics that lag behind the weights when a prefix stops, as they do early in a run, stay as they are.

**Read equals computed, bit for bit**, wherever a kernel's result for a row does not depend on the number of rows. On
the CPU (torch 2.13, oneDNN; convolutions of 8 to 128 channels, linear layers, 1 to 599 rows) it depended on it for
one row alone, so one row is computed as two. On CUDA cuDNN may choose another algorithm for another number of rows,
and the last bits may differ.

What the cache cannot see: an input that begins to vary is noticed within ``verify_every`` batches, and hooks on the
prefix's modules but the last see the model's input instead of activations when all rows are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip.forward_cache.chain import may_end_prefix, resolve_chain, unwrapped
from trainables.gradskip.forward_cache.prefix_pass import PassReport, PrefixPass
from trainables.gradskip.forward_cache.row_file import RowFile


class ForwardCache:
    """Outputs of a model's stopped prefix by sample, kept under a budget.

        with ForwardCache(model, samples=len(dataset), budget_bytes=10**9) as cache:
            for indices, images, labels in loader:
                with cache.batch(indices):
                    loss = loss_fn(model(images), labels)
                loss.backward()
                ...

    Nothing happens while nothing is stopped, in eval mode, or without gradients. The cache follows the stops by
    itself: a prefix that grows, or whose weights or running statistics change, begins a new one.

    Args:
        model: wrapping by DistributedDataParallel or torch.compile is seen through.
        samples: S; sample numbers are 0..S-1.
        budget_bytes: most bytes of the file, >= 0; the first samples seen are kept, the others always computed.
            16 bytes a sample beside it are in memory.
        folder: where the file lies; None: the system's folder for temporary files (often memory: /tmp).
        chain: modules, or their names, in the order in which they run: the first one's only input is the model's
            input, each other's only input is the output of the one before, and no output but the last is used
            elsewhere. None: the children of an nn.Sequential, nested ones included.
        verify_every: batches with hits from one check of the inputs to the next, >= 1; the first is always checked.

    Raises:
        UserError: an argument out of range, a folder that is not there, or a model whose chain must be given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int,
        budget_bytes: int,
        folder: str | Path | None = None,
        chain: Sequence[nn.Module] | Sequence[str] | None = None,
        verify_every: int = 16,
    ) -> None:
        for name, value, low in (
            ("samples", samples, 1), ("budget_bytes", budget_bytes, 0), ("verify_every", verify_every, 1)
        ):  # fmt: skip
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UserError(f"forward cache: {name} must be an integer >= {low}, got {value!r}")
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"forward cache: folder must be a folder that exists, got {str(folder)!r}: create it")
        self.model = unwrapped(model)
        self.chain, self.names = resolve_chain(self.model, chain)
        self.samples = samples
        self.verify_every = verify_every
        self.rows = RowFile(samples=samples, budget_bytes=budget_bytes, folder=folder)
        self.enabled = True
        """False for good once inputs were seen to vary, or after `close`."""
        self.hits = 0
        """Rows read, so far."""
        self.misses = 0
        """Rows computed because they were not held, so far."""
        self.last: PassReport | None = None
        """What the last `batch` did; None: the model ran untouched."""
        self.cached_through = -1
        """k, the index in the chain of the module whose outputs are kept; -1 for none."""
        self.hit_batches = 0
        """Batches with hits since the cache was begun."""
        self.input_kind: Any = None
        """Shape, type and autocast of the rows held, as `PrefixPass` saw them first."""
        self.stands_alone = False
        """Whether the prefix was seen to compute each row by itself."""
        self.channels_last = False
        """Memory layout of the outputs."""
        self.compiled = any(hasattr(part, "_orig_mod") for part in model.modules())
        """Whether torch.compile runs the model."""
        self._parts = [list(module.modules()) for module in self.chain]
        self._state: tuple[tuple[int, int], ...] = ()
        self._inside = False

    def __enter__(self) -> ForwardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.rows.bytes

    def update(self) -> None:
        """Follow the stops: find the prefix, and begin anew where it or what it computes changed. `batch` calls it."""
        if not self.enabled:
            return
        through = self._stopped_through()
        # Versions count in-place changes: a checkpoint loaded, a published optimizer's momentum on stopped layers.
        state = tuple(
            (id(tensor), tensor._version)
            for parts in self._parts[: through + 1]
            for part in parts
            for tensor in (*part._parameters.values(), *part._buffers.values())
            if tensor is not None
        )
        if through == self.cached_through and state == self._state:
            return
        if through == self.cached_through:
            self.rows.forget()
        else:
            self.rows.close()
            self.stands_alone = False
        self.cached_through, self._state = through, state
        self.hit_batches, self.input_kind = 0, None

    def _stopped_through(self) -> int:
        last = -1
        for position, parts in enumerate(self._parts):
            parameters = [p for part in parts for p in part._parameters.values() if p is not None]
            if any(parameter.requires_grad for parameter in parameters):
                break
            if parameters:
                last = position
        if last < 0:
            return -1
        # None of these enlarges its input, so the last one has the smallest outputs and saves the most.
        while last + 1 < len(self.chain) and may_end_prefix(self.chain[last + 1]):
            last += 1
        return last

    @contextmanager
    def batch(self, indices: Tensor) -> Iterator[None]:
        """Around one forward pass in training: rows that are held are read, the others computed and kept.

        Args:
            indices: (B,) int64 on the CPU, the sample number of each row of the model's input.

        Raises:
            UserError: indices of another form or out of range, or a model that does not run as the chain says.
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
            with PrefixPass(self, indices).running() as prefix_pass:
                yield
            prefix_pass.check_finished()
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

    def switch_off(self, reason: str) -> None:
        """Drop everything for good and say why."""
        self.close()
        self.say(f"off: {reason}")

    def say(self, what: str) -> None:
        """Warn."""
        warnings.warn(f"forward cache {what}", stacklevel=2)

    def close(self) -> None:
        """Drop everything and give the disk space back; the model runs untouched from here on."""
        self.enabled = False
        self.cached_through = -1
        self.rows.close()
