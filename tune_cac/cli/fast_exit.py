"""Exit with os._exit after the atexit handlers; skips the teardown of torch and Ray, which takes a second."""

from __future__ import annotations

import atexit
import os
import sys


class FastExit:
    """End this process with the exit code ``code``, in the last of its atexit handlers."""

    def __init__(self) -> None:
        self.code: int | None = None
        # The first registered handler runs last: after the threads have ended and every later handler has run.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is None:  # an exception ends the process
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # the output has no reader any more; Python itself reports that
            return
        os._exit(self.code)
