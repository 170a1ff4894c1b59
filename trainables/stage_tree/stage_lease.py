"""The lease of a trial on the stage that it trains, and the renewal of this lease."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainables.stage_tree.leases import StageLeases
from trainables.stage_tree.store import Stage

#: A trial loses its stage after this many seconds plus this many of its slowest steps without renewal.
LEASE_S, LEASE_STEPS = 15.0, 20
#: Seconds until the loss before its first step, in which the model is built, kernels are selected, FLOPs are counted.
BEGINNING_S = 60.0


class StageLease:
    """Hold the lease of at most one stage.

    Args:
        claims: the study's leases.
        holder: the trial's name there.
        slowest_step_s: seconds of the trial's slowest step so far; 0 before the first.
    """

    def __init__(self, claims: StageLeases, holder: str, slowest_step_s: Callable[[], float]) -> None:
        self._claims = claims
        self._holder = holder
        self._slowest_step_s = slowest_step_s
        self._stage: str | None = None
        self._renewed = 0.0

    def claim(self, stage: Stage) -> bool:
        """Lease a stage and release any other; return whether it is this trial's now."""
        if self._stage == stage.id:
            return True
        self.release()
        if not self._claims.claim(stage.id, self._holder, self._length_s()):
            return False
        self._stage = stage.id
        self._renewed = time.monotonic()
        return True

    def release(self) -> None:
        """Release the stage, if one is leased."""
        if self._stage is not None:
            self._claims.release(self._stage, self._holder)
            self._stage = None

    def renew(self, silence_s: float = 0.0) -> None:
        """Renew the lease when it is due, or before ``silence_s`` seconds without another call."""
        if self._stage is not None and time.monotonic() - self._renewed + silence_s > LEASE_S / 5:
            self._claims.renew(self._holder, self._length_s() + silence_s)
            self._renewed = time.monotonic()

    def _length_s(self) -> float:
        slowest_s = self._slowest_step_s()
        return LEASE_S + LEASE_STEPS * slowest_s if slowest_s else BEGINNING_S
