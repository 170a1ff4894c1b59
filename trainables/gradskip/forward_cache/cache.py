"""Forward cache: the outputs of a fully stopped prefix are computed once per sample and then read from a file.

Shapes: S samples in the training set; B rows of a batch; indices (B,) int64, the sample number of each row.

A prefix consists of the first modules m_0..m_k of a chain, none of whose parameters needs a gradient. Its outputs
depend on the input alone once its norms use their running statistics and its dropout is off, so both are in eval mode
here, whether a row is computed or read: a sample's output never depends on its batch or on the cache's content. This
differs from training without the cache, where a stopped batch norm still uses the batch's statistics. Running
statistics that lag behind the weights when a prefix stops, as they do early in a run, remain unchanged.

**Rows read equal rows computed, bit for bit**, wherever a kernel's result for a row does not depend on the number of
rows. On the CPU (torch 2.13, oneDNN; convolutions of 8 to 128 channels, linear layers, 1 to 599 rows) only the result
for a single row differed, so a single row is computed as two. On CUDA, cuDNN may choose another algorithm for another
number of rows, and the last bits may differ.

Limits: an input that begins to vary is noticed within ``verify_every`` batches, not at once; hooks on the prefix's
modules except the last receive the model's input instead of activations when all rows are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradskip.forward_cache.chain import may_end_prefix, resolve_chain, unwrapped
from trainables.gradskip.forward_cache.prefix_pass import PassReport, PrefixCache, PrefixPass
from trainables.gradskip.forward_cache.row_file import RowFile


class ForwardCache(PrefixCache):
    """Cache of a model's stopped-prefix outputs by sample, limited to a number of bytes.

        with ForwardCache(model, samples=len(dataset), budget_bytes=10**9) as cache:
            for indices, images, labels in loader:
                with cache.batch(indices):
                    loss = loss_fn(model(images), labels)
                loss.backward()
                ...

    The cache does nothing while nothing is stopped, in eval mode, or without gradients. It detects stops by itself, and
    starts anew when the prefix grows or when its weights or running statistics change.

    Args:
        model: may be wrapped by DistributedDataParallel or torch.compile.
        samples: S; sample numbers are 0..S-1.
        budget_bytes: maximum file size in bytes, >= 0; the first samples seen are kept, the others always computed.
            Another 16 bytes per sample are kept in memory.
        folder: folder of the file; None: the system's folder for temporary files (often in memory: /tmp).
        chain: modules, or their names, in execution order: the only input of the first is the model's input, the only
            input of each other module is the output of the one before, and only the last output is used elsewhere.
            None: the children of an nn.Sequential, nested ones included.
        verify_every: inputs are checked in every ``verify_every``-th batch with hits, starting with the first; >= 1.

    Raises:
        UserError: an argument out of range, a folder that does not exist, or a model whose chain must be given.
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
        self.last: PassReport | None = None
        """Report of the last `batch`; None: the model ran without the cache."""
        self.compiled = any(hasattr(part, "_orig_mod") for part in model.modules())
        self._parts = [list(module.modules()) for module in self.chain]
        self._state: tuple[tuple[int, int], ...] = ()
        self._inside = False

    def __enter__(self) -> ForwardCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """Return the size of the file in bytes."""
        return self.rows.bytes

    def update(self) -> None:
        """Find the stopped prefix, and start anew where it or its computation changed; `batch` calls this."""
        if not self.enabled:
            return
        through = self._stopped_through()
        # Versions count in-place changes: a loaded checkpoint, or a published optimizer's momentum on stopped layers.
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
        """Run one training forward pass that reads cached rows, and computes and stores the others.

        Args:
            indices: (B,) int64 on the CPU, the sample number of each row of the model's input.

        Raises:
            UserError: indices of another form or out of range, or a model that does not run the chain in its order.
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
