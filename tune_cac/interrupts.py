"""End a command on SIGTERM (`kill`, a batch system) as on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_is_an_interrupt() -> Iterator[None]:
    """Have SIGTERM do what SIGINT does now or will do; put back what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, frame: Any) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as in the background of a shell
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
