"""Eviction of checkpoints when space runs out: first those whose loss costs least.

Symbols: s step of a checkpoint, p step of the checkpoint before it, n step of the one after it, in iterations.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a stage."""

    step: int
    """The checkpoint is the complete state at the start of this iteration."""
    kind: str
    """Kind of the rule's own state inside; ``any`` if every rule can continue from it."""
    bytes: int
    """Size of its content."""
    sha256: str
    """Hash of its content, 64 hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class StageWeight:
    """Probability of a fork from a stage."""

    start: int
    """The stage's first step."""
    end: int
    """The step after its last one."""
    visits: int
    """The number of trials that passed through it; future forks are assumed proportional to this."""


@dataclass
class _Link:
    """A checkpoint among its neighbours of the same stage and kind, while some are dropped."""

    stage: str
    entry: Entry
    weight: StageWeight
    place: int
    before: _Link | None = None
    after: _Link | None = None
    version: int = 0  # raised when a neighbour changes; heap items of an older version are ignored
    dropped: bool = False

    def value_per_byte(self) -> float:
        previous = self.before.entry.step if self.before else self.weight.start
        following = self.after.entry.step if self.after else self.weight.end
        cost = expected_cost(self.entry.step, previous=previous, following=following, weight=self.weight)
        return cost / max(1, self.entry.bytes)


def expected_cost(step: int, *, previous: int, following: int, weight: StageWeight) -> float:
    """Return the steps that are trained again without a checkpoint: visits / (end - start) (n - s) (s - p).

    Forks are equally likely at every step of a stage. Without the checkpoint at s, forks at the n - s steps from s to
    the next checkpoint retrain s - p more steps, from the one before. The first checkpoint's p is the stage's start,
    the last one's n its end. (Entering a stage anew means retraining from its parent, which is slightly further still.)

    >>> expected_cost(40, previous=30, following=60, weight=StageWeight(start=0, end=100, visits=2))
    4.0
    """
    steps = max(1, weight.end - weight.start)
    return weight.visits / steps * max(0, following - step) * max(0, step - previous)


def to_drop(
    entries_by_stage: Mapping[str, Sequence[Entry]], weights: Callable[[str], StageWeight], bytes_to_free: int
) -> list[tuple[str, Entry]]:
    """Return the checkpoints to drop so that at least ``bytes_to_free`` become free, or all if they hold less.

    Greedy: drops the one of least cost per byte first, which raises the cost of its neighbours. Checkpoints of
    different kinds do not replace each other. Content that several entries name becomes free with the last of them, and
    an entry whose content stays anyway is kept.

    Args:
        entries_by_stage: all existing checkpoints, in any order.
        weights: returns the weight of a stage.
        bytes_to_free: bytes of content.

    Returns:
        (stage, entry), in the order in which they are dropped.
    """
    links = _chains(entries_by_stage, weights)
    holders = Counter(link.entry.sha256 for link in links)
    # Ties are broken by place in a fixed order, so that processes that thin at the same time choose the same.
    heap = [(link.value_per_byte(), link.place, link.version, link) for link in links]
    heapq.heapify(heap)
    given_up: list[_Link] = []
    freed = 0
    while heap and freed < bytes_to_free:
        _, _, version, link = heapq.heappop(heap)
        if link.dropped or version != link.version:
            continue
        link.dropped = True
        given_up.append(link)
        holders[link.entry.sha256] -= 1
        if holders[link.entry.sha256] == 0:
            freed += link.entry.bytes
        if link.before:
            link.before.after = link.after
        if link.after:
            link.after.before = link.before
        for neighbour in (link.before, link.after):
            if neighbour:
                neighbour.version += 1
                heapq.heappush(heap, (neighbour.value_per_byte(), neighbour.place, neighbour.version, neighbour))
    return [(link.stage, link.entry) for link in given_up if holders[link.entry.sha256] == 0]


def _chains(entries_by_stage: Mapping[str, Sequence[Entry]], weights: Callable[[str], StageWeight]) -> list[_Link]:
    """Return every checkpoint, linked to its neighbours of the same stage and kind."""
    links: list[_Link] = []
    for stage in sorted(entries_by_stage):
        if not entries_by_stage[stage]:
            continue
        weight = weights(stage)
        last: _Link | None = None
        for entry in sorted(entries_by_stage[stage], key=lambda e: (e.kind, e.step, e.sha256)):
            link = _Link(stage=stage, entry=entry, weight=weight, place=len(links))
            if last is not None and last.entry.kind == entry.kind:
                link.before, last.after = last, link
            links.append(link)
            last = link
    return links
