"""Fewer trials at a time when memory ran out, so that a trial that was killed for it fits when it is begun again."""

from __future__ import annotations

from analysis.formatting import plural
from tune_cac.messages import say


class MemoryConcurrency:
    """Halve the number of trials at a time whenever memory runs out, for the rest of the search."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._most_beside: dict[str, int | None] = {}  # by trial, `_most` when it began

    def admits(self, trial_id: str, running: int) -> bool:
        """Return whether a trial may begin beside so many others."""
        if self._most is not None and running >= self._most:
            return False
        self._most_beside[trial_id] = self._most
        return True

    def lower(self, trial_id: str, running: int) -> bool:
        """Take note that memory ran out; return whether the trial had more beside it than it will have.

        Args:
            trial_id: the trial that failed.
            running: number of trials that were running, with this one.
        """
        fewer = running // 2
        if fewer and (self._most is None or fewer < self._most):
            self._most = fewer
            say(f"memory ran out with {running} trials at a time: from here on at most {plural(fewer, 'trial')}")
        began_with = self._most_beside.get(trial_id)
        return self._most is not None and (began_with is None or began_with > self._most)
