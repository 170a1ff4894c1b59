"""Progress line on standard error for work that takes long."""

from __future__ import annotations

import sys
import time
from types import TracebackType

#: Nothing is shown before this time.
QUIET_S = 2.0
#: Time between lines on a terminal, where each replaces the last one, and elsewhere.
TERMINAL_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0


class Progress:
    """Count completed work; use it as a context manager.

    Args:
        total: total amount of work.
        what: name of the work, such as "decoding images".
    """

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._done = 0
        self._terminal = sys.stderr.isatty()
        self._due_s = time.monotonic() + QUIET_S
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def advance(self, count: int) -> None:
        """Add ``count`` to the completed work."""
        self._done += count
        if time.monotonic() >= self._due_s:
            self._show()

    def _show(self) -> None:
        self._shown = True
        self._due_s = time.monotonic() + (TERMINAL_INTERVAL_S if self._terminal else LOG_INTERVAL_S)
        start, end = ("\r", "") if self._terminal else ("", "\n")
        print(f"{start}{self._what}: {self._done:,} of {self._total:,}", end=end, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._show()
            if self._terminal:
                print(file=sys.stderr, flush=True)
