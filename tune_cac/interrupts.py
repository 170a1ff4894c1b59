"""SIGTERM (`kill`, a batch system) handled like Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Time after which an interrupt that Python has ignored comes again.
_AGAIN_AFTER_S = 0.05


@contextmanager
def sigterm_is_an_interrupt() -> Iterator[None]:
    """Handle SIGTERM with the handler that SIGINT has at that moment; restore SIGTERM's own handler at the end.

    An interrupt that comes where Python ignores exceptions comes again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, report = signal.signal(signal.SIGTERM, _interrupt), sys.unraisablehook

    def again(found: Any) -> None:
        # Python has ignored the exception, as in the callback of a weak reference (those of its import locks are such).
        if issubclass(found.exc_type, KeyboardInterrupt):
            threading.Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            report(found)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, frame: Any) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as in the background of a shell
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
