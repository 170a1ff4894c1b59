"""A command's end: what is loaded is not taken down piece by piece, which takes a second after torch and Ray."""

from __future__ import annotations

import atexit
import os
import sys


class FastExit:
    """Ends this process at its exit, once everything else has been done there, with the code that is put in."""

    def __init__(self) -> None:
        self.code: int | None = None
        # What is registered first is run last: after the threads have ended and every later handler has run.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is None:  # an exception is on its way out
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads any more; Python says so in its own way
            return
        os._exit(self.code)
