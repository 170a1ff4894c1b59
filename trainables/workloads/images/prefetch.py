"""A thread that makes the next batches while the consumer works on the current one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

#: Items that are made before they are requested.
AHEAD = 2


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def prefetched(items: Iterator[T], ahead: int = AHEAD) -> Generator[T, None, None]:
    """Yield the same items in the same order, made by a separate thread, up to ``ahead`` before they are requested.

    The thread starts with the first request. It ends after the last item, or when this iterator is closed or collected,
    which waits for the item being made. An exception from making an item is raised here, after the items before it.

    Args:
        items: only the thread may use it from now on.
        ahead: >= 1.
    """
    made: SimpleQueue[_Item[T] | _End] = SimpleQueue()
    room = threading.Semaphore(ahead)
    stop = threading.Event()
    # The thread must not reference this iterator, or it would never be collected.
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
            del one  # keep no reference to a delivered batch while waiting for the next one
    finally:
        stop.set()
        room.release()
        if threading.current_thread() is not thread:  # the garbage collector may run in the thread
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
