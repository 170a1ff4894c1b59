"""Leases for training stages; they lapse, so that no trial waits for ever for one that died."""

from __future__ import annotations

import time
from collections.abc import Callable


class Leases:
    """Leases of stages in this process's memory: a stage has at most one holder with a live lease.

    Every call can be repeated without harm, so that a caller that got no answer can repeat it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[str, float]] = {}  # holder, and clock time from which others may train, by stage

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """Lease a stage for ``lease_s`` seconds if it is free, lapsed or this holder's; return whether it is."""
        owner, until_s = self._leases.get(stage, (holder, 0.0))
        if owner != holder and self._clock() < until_s:
            return False
        self._leases[stage] = holder, self._clock() + lease_s
        return True

    def renew(self, holder: str, lease_s: float) -> None:
        """Extend all leases of this holder to ``lease_s`` seconds from now.

        A lapsed lease that no other holder has taken becomes valid again; one that another took is lost.
        """
        until_s = self._clock() + lease_s
        self._leases |= {stage: (holder, until_s) for stage, (owner, _) in self._leases.items() if owner == holder}

    def release(self, stage: str, holder: str) -> None:
        """Release a stage, if this holder has it."""
        if stage in self._leases and self._leases[stage][0] == holder:
            del self._leases[stage]

    def release_all(self, holder: str) -> None:
        """Release all stages of this holder."""
        self._leases = {stage: lease for stage, lease in self._leases.items() if lease[0] != holder}


#: A trial loses its stage after this many seconds plus this many of its slowest steps without renewal.
LEASE_S, LEASE_STEPS = 15.0, 20
#: Seconds until the loss before its first step, in which the model is built, kernels are selected, FLOPs are counted.
BEGINNING_S = 60.0


class StageLease:
    """A trial's lease of at most one stage; its length follows the trial's slowest step, 0 s before the first."""

    def __init__(self, claims: Leases, holder: str, slowest_step_s: Callable[[], float]) -> None:
        self._claims, self._holder, self._slowest_step_s = claims, holder, slowest_step_s
        self._stage: str | None = None
        self._renewed = 0.0

    def claim(self, stage: str) -> bool:
        """Lease a stage and release any other; return whether it is this trial's now."""
        if self._stage == stage:
            return True
        self.release()
        if not self._claims.claim(stage, self._holder, self._length_s()):
            return False
        self._stage, self._renewed = stage, time.monotonic()
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
