"""Steps that GradScaler lets a fused optimizer skip: the optimizer's `step` is called all the same."""

from __future__ import annotations

import torch
from torch import Tensor

from trainables.gradskip.rules.state_machine import SkipMachine


class SkippedSteps:
    """Takes steps that were skipped for infinities out of a machine's count; reads the device at decisions alone."""

    def __init__(self) -> None:
        self._total: Tensor | None = None  # skipped and still counted; on the device

    def is_skipped(self, found_inf: Tensor, machine: SkipMachine, due: int) -> bool:
        """Return whether the coming step does nothing, which is then no iteration.

        Away from decisions skipped steps are only summed up on the device; the sum is read when a decision is near.

        Args:
            found_inf: of GradScaler for this step, 1 where there are infinities.
            machine: whose iterations are counted.
            due: iterations before this one have nothing to decide.
        """
        if machine.iteration < due:
            self._total = found_inf.detach().clone() if self._total is None else self._total.add_(found_inf)
            return False
        now = found_inf.detach().reshape(())
        total = now.new_zeros(()) if self._total is None else self._total.reshape(())
        before, skips = torch.stack([total, now]).tolist()
        self._total = None
        machine.iteration -= round(before)
        if machine.iteration < due:
            self._total = found_inf.detach().clone()
            return False
        return bool(skips)

    def settle(self, machine: SkipMachine) -> None:
        """Take what the device knows of out of the count; waits for the device."""
        if self._total is not None:
            machine.iteration -= round(float(self._total))
            self._total = None

    def forget(self) -> None:
        """Begin anew, with another state."""
        self._total = None
