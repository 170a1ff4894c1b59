"""A thread that makes the next batches while the consumer works on this one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

#: Items that are ready before they are asked for.
AHEAD = 2


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def prefetched(items: Iterator[T], ahead: int = AHEAD) -> Generator[T, None, None]:
    """The same items in the same order, made by a thread of their own, up to ``ahead`` before they are asked for.

    The thread starts with the first item asked for. It ends when the items do, or once this iterator is closed or
    dropped, which waits for the item being made. What making an item raises is raised here, after the items before it.

    Args:
        items: only the thread uses it from now on.
        ahead: >= 1.
    """
    made: SimpleQueue[_Item[T] | _End] = SimpleQueue()
    room = threading.Semaphore(ahead)
    stop = threading.Event()
    # The thread must not know this iterator, or nobody could drop it.
    thread = threading.Thread(target=_make, args=(items, made, room, stop), name="tune_cac-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            one = made.get()
            if isinstance(one, _End):
                if one.error is not None:
                    raise one.error
                return
            room.release()
            yield one.value
            del one  # a batch that was handed over is not held while the next is waited for
    finally:
        stop.set()
        room.release()
        if threading.current_thread() is not thread:  # the garbage collector may run there
            thread.join()


def _make(
    items: Iterator[T], made: SimpleQueue[_Item[T] | _End], room: threading.Semaphore, stop: threading.Event
) -> None:
    try:
        while True:
            room.acquire()
            if stop.is_set():
                return
            try:
                value = next(items)
            except StopIteration:
                made.put(_End(None))
                return
            made.put(_Item(value))
            del value
    except BaseException as error:  # noqa: BLE001  # raised where the items are consumed
        made.put(_End(error))
