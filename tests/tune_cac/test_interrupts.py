"""Signals: SIGTERM as Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from tune_cac.interrupts import sigterm_is_an_interrupt


@pytest.fixture(autouse=True)
def ctrl_c_counts() -> Iterator[None]:
    """As at a terminal: in the background of a shell script Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def where_python_ignores_exceptions(send: Callable[[], None]) -> None:
    target = Referred()
    callback = weakref.ref(target, lambda _: send())
    del target
    assert callback() is None


class Referred:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", [lambda send: send(), where_python_ignores_exceptions])
def test_a_signal_ends_the_block_and_handlers_are_restored(
    number: signal.Signals, where: Callable[[Callable[[], None]], None]
) -> None:
    def interrupted() -> None:
        with sigterm_is_an_interrupt():
            where(lambda: os.kill(os.getpid(), number))
            time.sleep(10)

    before, begun = signal.getsignal(signal.SIGTERM), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < 10
    assert signal.getsignal(signal.SIGTERM) == before
