"""Steps that GradScaler makes a fused optimizer skip, although the optimizer's `step` is called."""

from __future__ import annotations

import torch
from torch import Tensor

from trainables.gradskip.rules.state_machine import SkipMachine


class SkippedSteps:
    """Subtract steps skipped for infinities from a machine's count; read the device only at decisions."""

    def __init__(self) -> None:
        self._total: Tensor | None = None  # skipped and still counted; on the device

    def is_skipped(self, found_inf: Tensor, machine: SkipMachine, due: int) -> bool:
        """Return whether the coming step is skipped, and thus is no iteration.

        Between decisions, skipped steps are only summed on the device; the sum is read when a decision is near.

        Args:
            found_inf: GradScaler's flag for this step, 1 where there are infinities.
            machine: counts the iterations.
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
        """Correct the iteration count by the steps that GradScaler skipped; synchronizes with the device."""
        if self._total is not None:
            machine.iteration -= round(float(self._total))
            self._total = None

    def forget(self) -> None:
        """Discard the sum, before another state is loaded."""
        self._total = None
