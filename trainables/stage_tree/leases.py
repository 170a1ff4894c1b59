"""Who trains which stage: leases that lapse, so that nobody waits for ever for one that died."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class StageClaims(Protocol):
    """What a trial asks before it trains a stage. `Claims` says what each call means."""

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """May this holder train the stage?"""

    def renew(self, holder: str, lease_s: float) -> None:
        """This holder is alive."""

    def release(self, stage: str, holder: str) -> None:
        """This holder is done with the stage."""

    def release_all(self, holder: str) -> None:
        """This holder is done with everything."""

    def holder_of(self, stage: str) -> str | None:
        """Who trains the stage."""


@dataclass(frozen=True, kw_only=True)
class _Lease:
    holder: str
    """Who may train the stage."""
    until_s: float
    """The clock's time from which on others may."""


class Claims:
    """Leases of stages in this process's memory: a stage has at most one holder with a live lease.

    Every call can be repeated without harm, as a caller does that got no answer.

    Args:
        clock: time in seconds that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """Take a stage for ``lease_s`` seconds from now, if it is free, its lease has lapsed, or it is held already.

        Returns:
            Whether this holder has it. If not, nothing has changed.
        """
        now = self._clock()
        lease = self._leases.get(stage)
        if lease is not None and lease.holder != holder and now < lease.until_s:
            return False
        self._leases[stage] = _Lease(holder=holder, until_s=now + lease_s)
        return True

    def renew(self, holder: str, lease_s: float) -> None:
        """All stages of this holder are its own for ``lease_s`` seconds from now.

        A lapsed lease that nobody has taken counts again; one that another took is lost.
        """
        until_s = self._clock() + lease_s
        for stage, lease in self._leases.items():
            if lease.holder == holder:
                self._leases[stage] = _Lease(holder=holder, until_s=until_s)

    def release(self, stage: str, holder: str) -> None:
        """Give a stage up, if this holder has it."""
        lease = self._leases.get(stage)
        if lease is not None and lease.holder == holder:
            del self._leases[stage]

    def release_all(self, holder: str) -> None:
        """Give up all stages of this holder."""
        self._leases = {stage: lease for stage, lease in self._leases.items() if lease.holder != holder}

    def holder_of(self, stage: str) -> str | None:
        """Who holds a stage with a live lease."""
        lease = self._leases.get(stage)
        return lease.holder if lease is not None and self._clock() < lease.until_s else None


class NoClaims:
    """Grants everything, for runs with nobody to share with."""

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        """Always granted."""
        return True

    def renew(self, holder: str, lease_s: float) -> None:
        """Nothing lapses."""

    def release(self, stage: str, holder: str) -> None:
        """Nothing is held."""

    def release_all(self, holder: str) -> None:
        """Nothing is held."""

    def holder_of(self, stage: str) -> str | None:
        """Nobody."""
        return None
