"""Leases for training stages; they lapse, so that no trial waits for ever for one that died."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class StageLeases(Protocol):
    """Interface by which a trial claims a stage before training it. `Leases` documents each call."""

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """Return whether this holder may train the stage."""

    def is_held(self, stage: str, holder: str) -> bool:
        """Return whether another holder trains the stage."""

    def renew(self, holder: str, lease_s: float) -> None:
        """Renew all leases of this holder."""

    def release(self, stage: str, holder: str) -> None:
        """Release this holder's lease on the stage."""

    def release_all(self, holder: str) -> None:
        """Release all leases of this holder."""


@dataclass(frozen=True, kw_only=True)
class _Lease:
    holder: str
    """Holder that may train the stage."""
    until_s: float
    """Clock time from which others may train it."""


class Leases:
    """Leases of stages in this process's memory: a stage has at most one holder with a live lease.

    Every call can be repeated without harm, so that a caller that got no answer can repeat it.

    Args:
        clock: returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """Lease a stage for ``lease_s`` seconds from now, if it is free, its lease lapsed, or this holder has it.

        Returns:
            Whether this holder has it. If not, nothing has changed.
        """
        if self.is_held(stage, holder):
            return False
        self._leases[stage] = _Lease(holder=holder, until_s=self._clock() + lease_s)
        return True

    def is_held(self, stage: str, holder: str) -> bool:
        """Return whether another holder has a live lease of the stage."""
        lease = self._leases.get(stage)
        return lease is not None and lease.holder != holder and self._clock() < lease.until_s

    def renew(self, holder: str, lease_s: float) -> None:
        """Extend all leases of this holder to ``lease_s`` seconds from now.

        A lapsed lease that no other holder has taken becomes valid again; one that another took is lost.
        """
        until_s = self._clock() + lease_s
        for stage, lease in self._leases.items():
            if lease.holder == holder:
                self._leases[stage] = _Lease(holder=holder, until_s=until_s)

    def release(self, stage: str, holder: str) -> None:
        """Release a stage, if this holder has it."""
        lease = self._leases.get(stage)
        if lease is not None and lease.holder == holder:
            del self._leases[stage]

    def release_all(self, holder: str) -> None:
        """Release all stages of this holder."""
        self._leases = {stage: lease for stage, lease in self._leases.items() if lease.holder != holder}
