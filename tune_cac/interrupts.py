"""End a command on SIGTERM (`kill`, a batch system) as on Ctrl-C, and on both at a moment at which it can end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
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


@contextmanager
def importing_beside(load: Callable[[], None]) -> Iterator[None]:
    """Run ``load``, which imports modules, in a thread beside the block; SIGINT and SIGTERM wait until it has ended.

    An exception that a signal raises while the main thread waits for Python's import lock, which two threads that
    import compete for, leaves it locked for ever: the other thread never ends, and so the process does not either.
    """
    waiting: list[signal.Signals] = []
    ended = threading.Event()
    main = threading.main_thread().ident
    assert main is not None  # it runs

    def run() -> None:
        try:
            load()
        finally:
            ended.set()
            for number in waiting[:1]:
                signal.pthread_kill(main, number)

    thread = threading.Thread(target=run, name="importing")
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main}

    def wait(number: int, frame: Any) -> None:
        handler = before[signal.Signals(number)]
        if not ended.is_set():
            waiting.append(signal.Signals(number))
        elif callable(handler):
            handler(number, frame)

    held = [number for number, handler in before.items() if callable(handler)]
    for number in held:
        signal.signal(number, wait)
    thread.start()
    try:
        yield
    finally:
        try:
            thread.join()
        finally:
            for number in held:
                signal.signal(number, before[number])


def _interrupt(_number: int, frame: Any) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, as in the background of a shell
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
