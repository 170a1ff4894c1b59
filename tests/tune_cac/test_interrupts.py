"""Signals: SIGTERM as Ctrl-C, and both wait while another thread imports."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from tune_cac.interrupts import importing_beside, sigterm_is_an_interrupt

NUMBERS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def ctrl_c_counts() -> Iterator[None]:
    """As at a terminal: in the background of a shell script Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def handlers() -> tuple[object, object]:
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.1)  # its handler has run


@NUMBERS
def test_a_signal_waits_while_another_thread_imports(number: signal.Signals) -> None:
    may_end, before, reached = threading.Event(), handlers(), []

    def interrupted() -> None:
        with sigterm_is_an_interrupt(), importing_beside(may_end.wait):
            send(number)
            reached.append("nothing was raised")
            may_end.set()
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached
    assert handlers() == before


@NUMBERS
def test_a_signal_at_the_end_of_the_block_is_not_lost(number: signal.Signals) -> None:
    may_end, before = threading.Event(), handlers()

    def interrupted() -> None:
        with sigterm_is_an_interrupt():
            with importing_beside(may_end.wait):
                send(number)
                threading.Timer(0.2, may_end.set).start()
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert handlers() == before


@NUMBERS
def test_after_the_import_a_signal_ends_the_block_at_once(number: signal.Signals) -> None:
    def interrupted() -> None:
        with sigterm_is_an_interrupt(), importing_beside(lambda: None):
            time.sleep(0.05)
            send(number)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_without_a_signal_nothing_is_raised() -> None:
    loaded = []
    with importing_beside(lambda: loaded.append(1)):
        pass
    assert loaded == [1]


@NUMBERS
def test_an_interrupt_where_python_ignores_exceptions_comes_again(number: signal.Signals) -> None:
    def interrupted() -> None:
        with sigterm_is_an_interrupt():
            target = threading.Event()
            callback = weakref.ref(target, lambda _: os.kill(os.getpid(), number))
            del target
            assert callback() is None
            time.sleep(10)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < 10
