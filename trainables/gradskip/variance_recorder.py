"""Variance trace of a run: the weight variance of each watched layer over time, as a small Parquet file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.signals import variance
from trainables.storage import atomic_write

#: Measurements are kept on the device until there are this many rows, or a tenth of those written, whichever is more:
#: the whole file is written each time, and this keeps the sum of all writes in proportion to the trace.
ROWS_BETWEEN_WRITES = 5_000


class Recorder:
    """Recorder of the watched layers' weight variances from now on; writes when closed, and every few thousand rows.

        with gradskip.record(optimizer, "variances.parquet", every=200):
            train(...)

    Args:
        optimizer: with Gradient-Skip.
        path: the Parquet file: iteration (int64), layer (int64, its number), name, variance (float64). Stopped layers
            are still recorded, with the variance at which they stopped. A resumed run continues an existing file and
            keeps its rows up to the iteration of the resume; a new run replaces it.
        every: iterations from one measurement to the next, >= 1. One measurement of ResNet-50's 53 convolutions costs
            about as much as two of its fused optimizer steps on a CPU (`benchmarks/step_overhead.py`).

    Raises:
        UserError: an optimizer without Gradient-Skip, or ``every`` out of range.
    """

    def __init__(
        self, optimizer: Optimizer, path: str | os.PathLike[str] = "variances.parquet", *, every: int = 200
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UserError(f"every must be an integer >= 1, got {every!r}")
        gradskip = getattr(optimizer, "gradskip", None)
        if not isinstance(gradskip, GradientSkip):
            raise UserError(
                f"record follows an optimizer with Gradient-Skip, got {type(optimizer).__name__} without: "
                "use gradskip.SGD, Adam, AdamW or gradskip.wrap(optimizer) first"
            )
        self.path = Path(path)
        self.every = every
        self._gradskip = gradskip
        self._pending: list[tuple[int, list[int], Tensor]] = []
        self._last = -1
        self._written: Any = None  # the table so far
        self._continues = True  # nothing is written yet: a resumed run continues the existing file
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        # This hook runs after the optimizer's own, which has counted the step already; steps that GradScaler made a
        # fused optimizer skip are subtracted from both counts only at the next decision.
        iteration = self._gradskip.machine.iteration - 1
        if iteration % self.every == 0 and iteration > self._last:
            self._last = iteration
            units = self._gradskip.plan.units
            if units:
                values = [variance([self._gradskip.parameters[n] for n in unit.watched]) for unit in units]
                # Stays on the device until enough rows are collected, so that recording does not wait for the device.
                self._pending.append((iteration, [unit.number for unit in units], torch.stack(values)))
                written = 0 if self._written is None else self._written.num_rows
                if len(self._pending) * len(units) >= max(ROWS_BETWEEN_WRITES, written // 10):
                    self.write()

    def _earlier(self) -> Any:
        """Return the rows that a resumed run recorded before this iteration; None if there are none."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        begun = self._pending[0][0] if self._pending else self._gradskip.iteration
        if begun == 0 or not self.path.exists():
            return None
        table = pq.read_table(self.path)
        table = table.set_column(2, "name", table["name"].cast("string"))
        return table.filter(pc.less(table["iteration"], begun))

    def write(self) -> None:
        """Write all rows so far; a reader never sees a partial file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._continues:
            self._written, self._continues = self._earlier(), False
        columns: dict[str, list[Any]] = {"iteration": [], "layer": [], "name": [], "variance": []}
        names = self._gradskip.names
        for iteration, layers, values in self._pending:
            columns["iteration"] += [iteration] * len(layers)
            columns["layer"] += layers
            columns["name"] += [None if names is None else names[layer] for layer in layers]
            columns["variance"] += values.double().tolist()
        self._pending.clear()
        kinds = {"iteration": pa.int64(), "layer": pa.int64(), "name": pa.string(), "variance": pa.float64()}
        new = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
        table = self._written = new if self._written is None else pa.concat_tables([self._written, new])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as file:
            pq.write_table(table, file, compression="zstd")

    def close(self) -> None:
        self._hook.remove()
        self.write()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: `Recorder`, as it is used: ``with gradskip.record(optimizer, ...)``.
record = Recorder
