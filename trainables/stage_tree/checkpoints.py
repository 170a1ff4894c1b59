"""Checkpoints of stages within a budget of bytes, in storage that several processes and nodes read and write.

    objects/<first two digits>/<sha256>                            contents, each stored once
    checkpoints/<stage>/<step>.<kind>.<bytes>.<sha256>             empty files: the index

A content is written before the index names it and is checked against its name whenever it is read. So after a crash, a
full disk or thinning by another process, a checkpoint is read whole or not at all, and a missing one costs only the
training since the checkpoint before it.
"""

from __future__ import annotations

import hashlib
import heapq
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainables.storage import FileState, files_of, is_uri, lacking_bytes


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

    Forks are equally likely at every step of a stage, and those from s to the next checkpoint retrain s - p more steps.
    The first checkpoint's p is the stage's start, the last one's n its end.

    >>> expected_cost(40, previous=30, following=60, weight=StageWeight(start=0, end=100, visits=2))
    4.0
    """
    steps = max(1, weight.end - weight.start)
    return weight.visits / steps * max(0, following - step) * max(0, step - previous)


def to_drop(
    entries_by_stage: Mapping[str, Sequence[Entry]], weights: Callable[[str], StageWeight], bytes_to_free: int
) -> list[tuple[str, Entry]]:
    """Return the checkpoints, with stages, to drop so that ``bytes_to_free`` become free, or all if they hold less.

    Greedy: drops the one of least cost per byte first, which raises the cost of its neighbours. Checkpoints of
    different kinds do not replace each other. Content that several entries name becomes free with the last of them, and
    an entry whose content stays anyway is kept.
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

    holders = Counter(entry.sha256 for _, entry in all_of)
    heap = [(value_per_byte(place), place) for place in range(len(all_of))]
    heapq.heapify(heap)
    given_up: list[tuple[str, Entry]] = []
    freed = 0
    while heap and freed < bytes_to_free:
        value, place = heapq.heappop(heap)
        if (now := value_per_byte(place)) > value:  # a neighbour has gone since, which only raises it
            heapq.heappush(heap, (now, place))
            continue
        entry = all_of[place][1]
        given_up.append(all_of[place])
        holders[entry.sha256] -= 1
        if holders[entry.sha256] == 0:
            freed += entry.bytes
        if before[place] >= 0:
            after[before[place]] = after[place]
        if after[place] < len(all_of):
            before[after[place]] = before[place]
    return [(stage, entry) for stage, entry in given_up if holders[entry.sha256] == 0]


# --- Checkpoints in storage -------------------------------------------------------------------------------------------

#: Thinning frees this share of the budget beyond what is needed, so that it is not needed again at once.
_SPARE_SHARE = 0.1

#: The folder is measured again after this object has written this share of the budget. N writers together exceed the
#: budget by at most N of these shares, and one checkpoint each, before one of them measures it.
_MEASURE_SHARE = 0.05

#: A content without an index entry may be a put in progress until this age; after that a crash has left it.
_UNNAMED_S = 60.0

#: The same for a temporary file, counted from its last write, which a slow file system may delay.
_TEMPORARY_S = 600.0

_STAGE = re.compile(r"[0-9A-Za-z_-]+")
_KIND = re.compile(r"[a-z0-9_-]+")
_ENTRY = re.compile(r"(?P<step>[0-9]{9,})\.(?P<kind>[a-z0-9_-]+)\.(?P<bytes>[0-9]+)\.(?P<sha256>[0-9a-f]{64})")
_OBJECTS, _INDEX = "objects", "checkpoints"
_OBJECT = re.compile(rf"{_OBJECTS}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")

_warned: set[str] = set()


class Checkpoints:
    """The checkpoints of all stages of one study.

    Args:
        root: folder of the store, created by the first put, or its URI.
        budget_bytes: most bytes of contents.
        weights: of every stage in the folder; None: all stages equal, from step 0 to the last checkpoint of any.
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
        """Store a checkpoint of an iteration's start, and thin if all of them together now exceed the budget.

        Returns:
            Whether it was stored (or was there already). Thinning may have removed it since. False, with one warning
            per process, if it cannot be written or is larger than the whole budget: training continues without it.
        """
        assert _STAGE.fullmatch(stage), stage
        assert _KIND.fullmatch(kind), kind
        assert step >= 0, step
        if len(data) > self._budget_bytes:
            if self._budget_bytes > 0:  # a budget of 0 is the user's choice
                _warn_once("budget", f"it has {len(data)} bytes and the budget is {self._budget_bytes}")
            return False
        entry = Entry(step=step, kind=kind, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        named = _indexed(stage, entry)
        try:
            if self._is_whole(entry) and self._files.size(named) is not None:
                return True
            if not self._leaves_reserve(entry.bytes):
                _warn_once("reserve", f"the disk of {self._files.place} has only the room that results need")
                return False
            self._store(entry, data)
            self._files.touch(named)
            # Another process may have removed the content as unneeded just before it was named.
            self._store(entry, data)
            if self._put_since_measured_bytes >= _MEASURE_SHARE * self._budget_bytes:
                self._total_bytes = sum(file.bytes for file in _contents(self._files.scan(_OBJECTS)).values())
                self._put_since_measured_bytes = 0
            if self._total_bytes > self._budget_bytes:
                self._thin()
        except OSError as error:
            _warn_once("write", f"{error.strerror or error} ({error.filename or named})")
            return False
        return True

    def entries(self, stage: str) -> list[Entry]:
        """Return the checkpoints of a stage, ascending by step; none if there is no such stage or reading fails."""
        try:
            return self._named(stage)
        except OSError:  # a failing network file system: training continues from an earlier one
            return []

    def _named(self, stage: str) -> list[Entry]:
        found = [entry for name in self._files.names(f"{_INDEX}/{stage}") if (entry := _parse(name))]
        return sorted(found, key=lambda entry: (entry.step, entry.kind, entry.sha256))

    def read(self, stage: str, entry: Entry) -> bytes | None:
        """Return the state of a checkpoint, exactly as it was put, or None.

        A content that is missing, truncated or corrupt is removed together with its entry.
        """
        try:
            data = self._files.read_if(
                _object(entry.sha256), lambda data: hashlib.sha256(data).hexdigest() == entry.sha256
            )
            if data is not None:
                return data
        except FileNotFoundError:
            pass
        except OSError:  # a failing file system does not mean that the checkpoint is bad
            return None
        self._files.remove(_indexed(stage, entry))
        self._put_since_measured_bytes = self._budget_bytes  # there is less now: measure at the next put
        return None

    def _is_whole(self, entry: Entry) -> bool:
        return self._files.size(_object(entry.sha256)) == entry.bytes

    def _store(self, entry: Entry, data: bytes) -> None:
        """Write the content if it is missing, else renew its time so that no process removes it as unnamed."""
        name = _object(entry.sha256)
        if self._is_whole(entry) and self._files.renew(name):
            return
        self._files.write(name, (data,))
        self._total_bytes += entry.bytes
        self._put_since_measured_bytes += entry.bytes

    def _leaves_reserve(self, size: int) -> bool:
        """Return whether the disk has room for so many bytes beside its reserve, after thinning if it had not."""
        if is_uri(self._files.place):
            return True
        folder = Path(self._files.place)
        if lacking := lacking_bytes(folder, size):
            self._thin(lacking)
            return not lacking_bytes(folder, size)
        return True

    def _thin(self, lacking: int = 0) -> None:
        """Remove leftovers, then the checkpoints whose loss costs least; ``lacking`` bytes must become free."""
        index, sizes = self._without_leftovers()
        total = sum(sizes.values())
        most = min(self._budget_bytes, total - lacking)
        spare = int(_SPARE_SHARE * self._budget_bytes)
        last = max((entry.step for entries in index.values() for entry in entries), default=0)
        weights = self._weights or (lambda stage: StageWeight(start=0, end=1 + last, visits=1))
        contents: dict[str, list[tuple[str, Entry]]] = {}  # in the order in which their last entries are dropped
        for stage, entry in to_drop(index, weights, total - min(self._budget_bytes - spare, most)):
            contents[entry.sha256] = [*contents.pop(entry.sha256, []), (stage, entry)]
        for sha256, names in contents.items():
            # The spare room is for many small checkpoints; do not drop a large one for it.
            if total <= most and sizes[sha256] > spare:
                break
            for stage, entry in names:  # before the content, so that no entry is left without it
                self._files.remove(_indexed(stage, entry))
            self._files.remove(_object(sha256))
            total -= sizes[sha256]
        self._total_bytes, self._put_since_measured_bytes = total, 0

    def _without_leftovers(self) -> tuple[dict[str, list[Entry]], dict[str, int]]:
        """Remove leftovers of crashes; return the entries by stage, and the sizes of contents in bytes."""
        # The index first: a content is written before its entry, so an entry without content is broken.
        stages = [name for name in self._files.names(_INDEX) if _STAGE.fullmatch(name)]
        index = {stage: self._named(stage) for stage in stages}
        files, now = list(self._files.scan(_OBJECTS)), time.time()
        contents = _contents(files)
        for file in files:
            if file.is_temporary and now - file.changed_s > _TEMPORARY_S:
                self._files.remove(file.name)
        for stage, entries in index.items():
            listed = [e for e in entries if e.sha256 in contents and contents[e.sha256].bytes == e.bytes]
            for entry in entries:
                # Checked again: a folder listing may lag a minute behind another node.
                if entry not in listed and not self._is_whole(entry):
                    self._files.remove(_indexed(stage, entry))
            index[stage] = listed
        named = {entry.sha256 for entries in index.values() for entry in entries}
        old = {sha256 for sha256, file in contents.items() if now - file.changed_s > _UNNAMED_S}
        for sha256 in old - named:
            self._files.remove(_object(sha256))
            del contents[sha256]
        return index, {sha256: file.bytes for sha256, file in contents.items()}


def _contents(files: Iterable[FileState]) -> dict[str, FileState]:
    return {file.base_name: file for file in files if _OBJECT.fullmatch(file.name)}


def _object(sha256: str) -> str:
    return f"{_OBJECTS}/{sha256[:2]}/{sha256}"


def _indexed(stage: str, entry: Entry) -> str:
    return f"{_INDEX}/{stage}/{entry.step:09d}.{entry.kind}.{entry.bytes}.{entry.sha256}"


def _parse(name: str) -> Entry | None:
    match = _ENTRY.fullmatch(name)
    if match is None:
        return None
    entry = Entry(step=int(match["step"]), kind=match["kind"], bytes=int(match["bytes"]), sha256=match["sha256"])
    return entry if _indexed("", entry).endswith(f"/{name}") else None


def _warn_once(key: str, reason: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"a checkpoint was not kept: {reason}; training goes on, and trials that would have continued from it "
            "train from an earlier one",
            stacklevel=3,
        )
