"""Entry point of ``python -m tune_cac`` and of the console script ``tune-cac``."""

from __future__ import annotations

import atexit
import os
import sys

from tune_cac.cli.main import main

__all__ = ["main", "run"]


class FastExit:
    """Exit with ``code`` by os._exit in the last atexit handler, without the teardown of torch and Ray: a second."""

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


def run() -> None:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    leaving = FastExit()
    leaving.code = main()
    sys.exit(leaving.code)


if __name__ == "__main__":
    run()
