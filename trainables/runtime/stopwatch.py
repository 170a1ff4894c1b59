"""Stopwatch with pauses and excluded time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Stopwatch that adds up the seconds while it runs.

    Args:
        excluded: returns a running total of seconds to exclude; what is added while the stopwatch runs is subtracted.
    """

    def __init__(self, excluded: Callable[[], float] = lambda: 0.0) -> None:
        self._excluded = excluded
        self._before = 0.0
        self._since: tuple[float, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds so far."""
        if self._since is None:
            return self._before
        begun, excluded = self._since
        return self._before + time.perf_counter() - begun - (self._excluded() - excluded)

    @elapsed_s.setter
    def elapsed_s(self, value: float) -> None:
        self._before = value
        if self._since is not None:
            self._since = (time.perf_counter(), self._excluded())

    def start(self) -> None:
        """Start or continue; does nothing if it runs."""
        if self._since is None:
            self._since = (time.perf_counter(), self._excluded())

    def pause(self) -> None:
        """Pause; does nothing if it is paused."""
        self._before, self._since = self.elapsed_s, None
