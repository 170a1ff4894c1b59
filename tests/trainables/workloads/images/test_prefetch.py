"""The thread that makes batches ahead ends whenever its iterator does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from trainables.workloads.images.prefetch import prefetched


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tune_cac-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert alive() == []


class Counted:
    """Items 0, 1, ... with a note of how many were made."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.made = 0
        self.waiting = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for item in range(self.count):
            if item == self.fails_at:
                raise KeyError("a broken image")
            self.made += 1
            if self.made == 3:
                self.waiting.set()
            yield item


def test_all_items_in_order() -> None:
    assert list(prefetched(iter(Counted(50)))) == list(range(50))
    assert list(prefetched(iter([]))) == []


def test_it_makes_two_ahead_and_no_more() -> None:
    counted = Counted(50)
    items = prefetched(iter(counted), ahead=2)
    assert counted.made == 0  # nothing before the first is asked for
    assert next(items) == 0
    for at in range(1, 20):
        assert next(items) == at
        assert counted.made <= at + 3  # handed over, two ready; one is counted the moment it is begun
    items.close()
    assert counted.made <= 22


def test_it_works_while_the_consumer_does() -> None:
    counted = Counted(50)
    items = prefetched(iter(counted), ahead=2)
    next(items)
    assert counted.waiting.wait(timeout=60)  # the third was made without being asked for
    items.close()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_closed_or_dropped_in_the_middle(taken: int) -> None:
    for drop in (True, False):
        items = prefetched(iter(Counted(50)))
        for _ in range(taken):
            next(items)
        assert len(alive()) == (taken > 0)
        if drop:
            del items
        else:
            items.close()
        assert alive() == []


@pytest.mark.slow
def test_dropped_in_a_cycle() -> None:
    cycle: list[object] = [prefetched(iter(Counted(50)))]
    next(cycle[0])  # type: ignore[call-overload]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert alive() == []


def test_it_ends_by_itself_after_the_last_item() -> None:
    items = prefetched(iter(Counted(3)))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    for thread in threading.enumerate():
        if thread.name == "tune_cac-prefetch":
            thread.join(timeout=60)
    assert alive() == []
    items.close()


def test_errors_reach_the_consumer_after_the_items_before() -> None:
    items = prefetched(iter(Counted(50, fails_at=4)))
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="a broken image"):
        next(items)
    assert alive() == []
    with pytest.raises(StopIteration):
        next(items)
