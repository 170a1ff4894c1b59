"""SIGTERM (`kill`, a batch system) handled like Ctrl-C, and both delayed while a thread imports modules."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

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


@contextmanager
def importing_beside(load: Callable[[], None]) -> Iterator[None]:
    """Run ``load``, which imports modules, in a thread during the block; delay SIGINT and SIGTERM until it ends.

    Two importing threads compete for Python's import lock. If a signal raises an exception while the main thread waits
    for that lock, it stays locked for ever: the other thread never ends, and neither does the process.
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


def end_now(code: int) -> NoReturn:
    """End this process from any thread, without waiting for others."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
