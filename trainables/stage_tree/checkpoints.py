"""Checkpoints of stages within a budget of bytes, in storage that several processes and nodes read and write.

    checkpoints/<stage>/<step>.<kind>.<bytes>.<sha256>             a content, named by what it is

A file is written under another name first, and its content is checked against its name whenever it is read. So after
a crash, a full disk or thinning by another process, a checkpoint is read whole or not at all, and a missing one costs
only the training since the checkpoint before it.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainables.storage import files_of, is_uri, lacking_bytes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a stage."""

    step: int  # the checkpoint is the complete state at the start of this iteration
    kind: str  # kind of the rule's own state inside; ``any`` if every rule can continue from it
    bytes: int  # size of its content
    sha256: str  # hash of its content, 64 hexadecimal digits


# --- Eviction of checkpoints when space runs out: first those whose loss costs least ----------------------------------
# Symbols: s step of a checkpoint, p step of the checkpoint before it, n step of the one after it, in iterations.


@dataclass(frozen=True, kw_only=True)
class StageWeight:
    """Probability of a fork from a stage."""

    start: int  # the stage's first step
    end: int  # the step after its last one
    visits: int  # the number of trials that passed through it; future forks are assumed proportional to this


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
    different kinds do not replace each other. They are (stage, entry), in the order in which they are dropped.
    """
    # All in a fixed order: ties are broken by place, so that processes that thin at the same time choose the same.
    all_of = [
        (stage, entry)
        for stage in sorted(entries_by_stage)
        for entry in sorted(entries_by_stage[stage], key=lambda e: (e.kind, e.step, e.sha256))
    ]
    weight_of = {stage: weights(stage) for stage in dict.fromkeys(stage for stage, _ in all_of)}
    before, after = [*range(-1, len(all_of) - 1)], [*range(1, len(all_of) + 1)]  # places of the neighbours left

    def step_of(place: int, like: tuple[str, Entry], otherwise: int) -> int:
        """Return the step at a place, if it is of the same stage and kind."""
        if not 0 <= place < len(all_of):
            return otherwise
        stage, entry = all_of[place]
        return entry.step if (stage, entry.kind) == (like[0], like[1].kind) else otherwise

    def value_per_byte(place: int) -> float:
        stage, entry = one = all_of[place]
        weight = weight_of[stage]
        previous, following = step_of(before[place], one, weight.start), step_of(after[place], one, weight.end)
        return expected_cost(entry.step, previous=previous, following=following, weight=weight) / max(1, entry.bytes)

    heap = [(value_per_byte(place), place) for place in range(len(all_of))]
    heapq.heapify(heap)
    dropped: list[tuple[str, Entry]] = []
    freed = 0
    while heap and freed < bytes_to_free:
        value, place = heapq.heappop(heap)
        if (now := value_per_byte(place)) > value:  # a neighbour has gone since, which only raises it
            heapq.heappush(heap, (now, place))
            continue
        dropped.append(all_of[place])
        freed += all_of[place][1].bytes
        if before[place] >= 0:
            after[before[place]] = after[place]
        if after[place] < len(all_of):
            before[after[place]] = before[place]
    return dropped


#: Thinning frees this share of the budget beyond what is needed, so that it is not needed again at once.
_SPARE_SHARE = 0.1

#: The folder is measured again after this object has written this share of the budget. N writers together exceed the
#: budget by at most N of these shares, and one checkpoint each, before one of them measures it.
_MEASURE_SHARE = 0.05

#: A temporary file may be written on until this age, counted from its last write, which a slow file system may delay.
_TEMPORARY_S = 600.0

_STAGE = re.compile(r"[0-9A-Za-z_-]+")
_KIND = re.compile(r"[a-z0-9_-]+")
_ENTRY = re.compile(r"(?P<step>[0-9]{9,})\.(?P<kind>[a-z0-9_-]+)\.(?P<bytes>[0-9]+)\.(?P<sha256>[0-9a-f]{64})")
_FOLDER = "checkpoints"

_warned: set[str] = set()


class Checkpoints:
    """The checkpoints of all stages of one study.

    Args:
        root: folder of the store, created by the first put, or its URI.
        budget_bytes: most bytes of contents. `checkpoints.to_drop` chooses what is removed beyond it.
        weights: returns how likely and how expensive a fork from a stage is. Called for every stage in the folder,
            including those of other searches. None: all stages equal, from step 0 to the last checkpoint of any.
    """

    def __init__(
        self, root: Path | str, budget_bytes: int, weights: Callable[[str], StageWeight] | None = None
    ) -> None:
        assert budget_bytes >= 0
        self._files = files_of(root)
        self._budget_bytes = budget_bytes
        self._weights = weights
        self._total_bytes = 0
        # Starts at the whole budget, so that the first put measures and a process that only reads never does.
        self._put_since_measured_bytes = budget_bytes

    def put(self, stage: str, step: int, data: bytes, *, kind: str = "any") -> bool:
        """Store a checkpoint, and thin if all of them together now exceed the budget.

        The state is that of the iteration's start; ``kind`` is that of the rule's own state inside. Return whether it
        was stored (or was there already); thinning may have removed it since. False, with one warning per process, if
        it cannot be written or is larger than the whole budget: training continues without it.
        """
        assert _STAGE.fullmatch(stage), stage
        assert _KIND.fullmatch(kind), kind
        assert step >= 0, step
        if len(data) > self._budget_bytes:
            if self._budget_bytes > 0:  # a budget of 0 is the user's choice
                _warn_once("budget", f"it has {len(data)} bytes and the budget is {self._budget_bytes}")
            return False
        entry = Entry(step=step, kind=kind, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        name = _name(stage, entry)
        try:
            if self._files.size(name) == entry.bytes:
                return True
            if not self._leaves_reserve(entry.bytes):
                _warn_once("reserve", f"the disk of {self._files.place} has only the room that results need")
                return False
            self._files.write(name, (data,))
            self._total_bytes += entry.bytes
            self._put_since_measured_bytes += entry.bytes
            if self._put_since_measured_bytes >= _MEASURE_SHARE * self._budget_bytes:
                self._total_bytes = sum(file.bytes for file in self._files.scan(_FOLDER))
                self._put_since_measured_bytes = 0
            if self._total_bytes > self._budget_bytes:
                self.thin()
        except OSError as error:
            _warn_once("write", f"{error.strerror or error} ({error.filename or name})")
            return False
        return True

    def entries(self, stage: str) -> list[Entry]:
        """Return the checkpoints of a stage, ascending by step; none if there is no such stage or reading fails."""
        try:
            found = [entry for name in self._files.names(f"{_FOLDER}/{stage}") if (entry := _parse(name))]
        except OSError:  # a failing network file system: training continues from an earlier one
            return []
        return sorted(found, key=lambda entry: (entry.step, entry.kind, entry.sha256))

    def read(self, stage: str, entry: Entry) -> bytes | None:
        """Return the state of a checkpoint, exactly as it was put, or None; one truncated or corrupt is removed."""
        try:
            data = self._files.read_if(
                _name(stage, entry), lambda data: hashlib.sha256(data).hexdigest() == entry.sha256
            )
        except OSError:  # a failing file system does not mean that the checkpoint is bad
            return None
        if data is None:
            self._put_since_measured_bytes = self._budget_bytes  # there is less now: measure at the next put
        return data

    def _leaves_reserve(self, size: int) -> bool:
        """Return whether the disk has room for so many bytes beside its reserve, after thinning if it had not."""
        if is_uri(self._files.place):
            return True
        folder = Path(self._files.place)
        if lacking := lacking_bytes(folder, size):
            self.thin(lacking)
            return not lacking_bytes(folder, size)
        return True

    def thin(self, lacking: int = 0) -> None:
        """Remove leftovers, then the checkpoints whose loss costs least, until the rest is within the budget.

        ``lacking`` bytes have to become free on the disk, also where the budget is not exceeded.
        """
        index = self._without_leftovers()
        total = sum(entry.bytes for entries in index.values() for entry in entries)
        most = min(self._budget_bytes, total - lacking)
        spare = int(_SPARE_SHARE * self._budget_bytes)
        last = max((entry.step for entries in index.values() for entry in entries), default=0)
        weights = self._weights or (lambda stage: StageWeight(start=0, end=1 + last, visits=1))
        for stage, entry in to_drop(index, weights, total - min(self._budget_bytes - spare, most)):
            # The spare room is for many small checkpoints; do not drop a large one for it.
            if total <= most and entry.bytes > spare:
                break
            self._files.remove(_name(stage, entry))
            total -= entry.bytes
        self._total_bytes, self._put_since_measured_bytes = total, 0

    def _without_leftovers(self) -> dict[str, list[Entry]]:
        """Return entries by stage, after removing what crashes have left."""
        index: dict[str, list[Entry]] = {}
        for file in list(self._files.scan(_FOLDER)):
            if file.is_temporary:
                if time.time() - file.changed_s > _TEMPORARY_S:
                    self._files.remove(file.name)
                continue
            stage = file.name.split("/")[1]
            entry = _parse(file.base_name)
            if entry is None or file.name != _name(stage, entry):
                continue
            if file.bytes == entry.bytes:
                index.setdefault(stage, []).append(entry)
            else:
                self._files.remove(file.name)
        return index


def _name(stage: str, entry: Entry) -> str:
    return f"{_FOLDER}/{stage}/{entry.step:09d}.{entry.kind}.{entry.bytes}.{entry.sha256}"


def _parse(name: str) -> Entry | None:
    """Return the checkpoint that a file's name describes, or None for a foreign file."""
    match = _ENTRY.fullmatch(name)
    if match is None:
        return None
    entry = Entry(step=int(match["step"]), kind=match["kind"], bytes=int(match["bytes"]), sha256=match["sha256"])
    return entry if _name("", entry).endswith(f"/{name}") else None


def _warn_once(key: str, reason: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"a checkpoint was not kept: {reason}; training goes on, and trials that would have continued from it "
            "train from an earlier one",
            stacklevel=3,
        )
