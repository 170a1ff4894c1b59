"""Stages in storage: signals and rows recorded during all training. Without torch, since analysis reads them too.

Layout under a study's ``tree`` folder; every file has a checksum and is written atomically:

    <root id>/root.json                        facts that the runs share, "layer_names", "trains": a digit a parameter,
                                               "weight_decays": those of weights, null where there are none
    <root id>/facts-<digest>.json              {"key": attachment.metadata_key, "facts": about the model, for a method}
    <root id>/shapes.json                      run lengths of batch shapes: [[count, [[shape, dtype], ...]], ...]
    <root id>/costs-<digest>.json              {"trains": a digit per parameter, of an epoch
                                               "steps": [[count, forward_flops, backward_flops], ...]}
    <root id>/stages/<stage id>/stage.json     parent, intervention
    <root id>/stages/<stage id>/<from>-<to>-<digest>.chunk      signals and rows of steps from..to-1

A chunk holds signals of iterations [from, to) and the rows of epochs that end at from+1..to steps. Chunks may overlap:
steps that two processes trained are equal.

Shapes: T steps of a chunk, K dense signals; values (T, K) float64.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.interventions import Intervention, MissingSignal, child_id
from trainables.metrics import current_row
from trainables.storage import Files, files_of

# A checksum in the first line detects what `trainables.storage.atomic_write` cannot prevent: blocks that a crashed
# machine never wrote. It has 64 hexadecimal digits and a line feed.
_HEADER_BYTES = 65


def write_checked(files: Files, name: str, payload: bytes) -> None:
    """Write a payload with its checksum, and missing folders; after an OSError the file has its previous content."""
    files.write(name, (_header(payload), payload))


def read_checked(files: Files, name: str) -> bytes | None:
    """Return the payload, or None for a file that is missing, unreadable or corrupt.

    A file whose checksum does not match is removed, unless another process has replaced it meanwhile.
    """
    try:
        data = files.read_if(name, lambda data: data[:_HEADER_BYTES] == _header(data[_HEADER_BYTES:]))
    except OSError:
        return None
    return None if data is None else data[_HEADER_BYTES:]


def _header(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Recorded steps of a part of a stage."""

    begin: int  # first iteration
    end: int  # iteration after the last
    names: tuple[str, ...]  # names of the dense signals, recorded at every iteration
    values: NDArray[np.float64]  # (end - begin, len(names))
    # Signals measured at some iterations only: (iteration, value) pairs, by name.
    sparse: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    # Rows of epochs by the number of steps at their end, without the method's own columns.
    rows: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the chunk as one line of JSON followed by the values."""
        head = {
            "begin": self.begin,
            "end": self.end,
            "names": list(self.names),
            "sparse": {name: [list(pair) for pair in pairs] for name, pairs in self.sparse.items()},
            "rows": {str(step): dict(row) for step, row in self.rows.items()},
        }
        values = np.ascontiguousarray(self.values, dtype="<f8")
        return json.dumps(head).encode() + b"\n" + values.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Chunk:
        """Build a chunk from the result of `to_bytes`."""
        line, _, rest = data.partition(b"\n")
        head = json.loads(line)
        shape = (head["end"] - head["begin"], len(head["names"]))
        return cls(
            begin=head["begin"],
            end=head["end"],
            names=tuple(head["names"]),
            values=np.frombuffer(rest, dtype="<f8").reshape(shape),
            sparse={name: tuple((int(i), float(v)) for i, v in pairs) for name, pairs in head["sparse"].items()},
            rows={int(step): row for step, row in head["rows"].items()},
        )

    def file_name(self) -> str:
        """Return a file name that is equal only for the same steps, signals and rows, so that no data is replaced."""
        rows = (f"row {step}" for step in sorted(self.rows))
        digest = hashlib.sha256("\n".join((*self.names, *sorted(self.sparse), *rows)).encode()).hexdigest()[:8]
        return f"{self.begin:09d}-{self.end:09d}-{digest}.chunk"


class Stage:
    """The known chunks of one stage. `refresh` reads those that others have published; without ``files``, none."""

    def __init__(self, files: Files | None, folder: str, stage: str, start: int) -> None:
        self.id = stage
        self.start = start  # first iteration of the stage: 0 for the root, else the one after its intervention
        self.known_until = start  # every iteration in [`start`, `known_until`) was trained and recorded
        self.rows: dict[int, Mapping[str, Any]] = {}  # rows of epochs by the number of steps at their end
        self._files, self._folder = files, folder
        self._seen: set[str] = set()
        self._spans: list[tuple[int, int]] = []
        self._dense: dict[str, list[tuple[int, int, NDArray[np.float64]]]] = {}
        self._sparse: dict[str, dict[int, float]] = {}

    def refresh(self) -> bool:
        """Read new chunks and return whether there were any."""
        new = False
        if self._files is None:
            return new
        names = {name for name in _names(self._files, self._folder) if name.endswith(".chunk")}
        for name in sorted(names - self._seen):
            data = read_checked(self._files, f"{self._folder}/{name}")
            if data is None:
                continue  # corrupt and removed, or gone
            self._seen.add(name)
            self.add(Chunk.from_bytes(data))
            new = True
        return new

    def add(self, chunk: Chunk) -> None:
        """Add a chunk to the stage."""
        self.rows.update({step: current_row(row) for step, row in chunk.rows.items()})
        for column, name in enumerate(chunk.names):
            self._dense.setdefault(name, []).append((chunk.begin, chunk.end, chunk.values[:, column]))
        for name, pairs in chunk.sparse.items():
            self._sparse[name] = {**dict(pairs), **self._sparse.get(name, {})}
        self._spans.append((chunk.begin, chunk.end))
        self.known_until = _covered(self.start, self._spans)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its dense signals."""
        return tuple(self._dense)

    def at(self, name: str, iteration: int) -> float:
        """Return the signal at an iteration; raise MissingSignal if it was not recorded."""
        # The chunk added first wins, so that a value that a trial has read never changes if devices round differently.
        value = self._sparse.get(name, {}).get(iteration)
        for begin, end, values in self._dense.get(name, ()):
            if begin <= iteration < end:
                value = float(values[iteration - begin])
                if value == value:  # not NaN; a chunk that has the signal of other steps only has NaN here
                    return value
        if value is None:
            raise MissingSignal(name)
        return value

    def has(self, name: str, iteration: int) -> bool:
        """Return whether the signal was recorded at the iteration."""
        try:
            self.at(name, iteration)
        except MissingSignal:
            return False
        return True

    def knows(self, chunk: Chunk) -> bool:
        """Return whether all of a chunk was recorded before."""
        spans = {name: [span[:2] for span in self._dense.get(name, ())] for name in chunk.names}
        return (
            chunk.end <= self.known_until
            and all(step in self.rows for step in chunk.rows)
            and all(_covered(chunk.begin, spans[name]) >= chunk.end for name in chunk.names)
            and all(self.has(name, i) for name, pairs in chunk.sparse.items() for i, _ in pairs)
        )

    def dense(self, name: str) -> NDArray[np.float64]:
        """Return a dense signal over [start, known_until), NaN where it was not recorded."""
        found = np.full(max(0, self.known_until - self.start), np.nan)
        for begin, end, values in self._dense.get(name, ()):
            low, high = max(begin, self.start), min(end, self.known_until)
            if low < high:
                part = found[low - self.start : high - self.start]
                np.copyto(part, values[low - begin : high - begin], where=np.isnan(part))
        return found


def _names(files: Files, folder: str) -> list[str]:
    try:
        return files.names(folder)
    except OSError:
        return []


def _covered(start: int, spans: Iterable[tuple[int, int]]) -> int:
    until = start
    for begin, end in sorted(spans):
        if begin > until:
            break
        until = max(until, end)
    return until


class StageStore:
    """The stages of one root, whose id is also that of its first stage."""

    def __init__(self, tree: Path | str, root: str) -> None:
        self.root = root
        self.tree = tree
        self.files = files_of(tree)
        self._stages: dict[str, Stage] = {}
        self._links: dict[str, tuple[str, Intervention] | None] = {}

    def first(self) -> Stage:
        """Return the root stage."""
        return self._stage(self.root, 0)

    def child(self, stage: Stage, intervention: Intervention) -> Stage:
        """Return the stage that an intervention leads to, trained or not."""
        return self._stage(child_id(stage.id, intervention), intervention.iteration + 1)

    def _stage(self, stage: str, start: int) -> Stage:
        if stage not in self._stages:
            self._stages[stage] = self.stage(stage, start)
        return self._stages[stage]

    def stage(self, stage: str, start: int) -> Stage:
        """Return a stage of its own, of which nothing has been read."""
        return Stage(self.files, f"{self.root}/stages/{stage}", stage, start)

    def publish(self, stage: Stage, chunk: Chunk, link: tuple[Stage, Intervention] | None) -> None:
        """Write a chunk; ``link`` is the stage's parent and intervention, None for the root stage.

        OSError: it cannot be written. Only this process then has the chunk.
        """
        stage.add(chunk)
        name = f"stages/{stage.id}/stage.json"
        if stage.id not in self._links:
            if self.files.size(f"{self.root}/{name}") is None:
                values: dict[str, Any] = {"parent": None}
                if link is not None:
                    parent, intervention = link
                    values = {"parent": parent.id, "iteration": intervention.iteration, "action": intervention.action}
                self.write(name, values)
            self._links[stage.id] = None if link is None else (link[0].id, link[1])
        write_checked(self.files, f"{self.root}/stages/{stage.id}/{chunk.file_name()}", chunk.to_bytes())

    def links(self) -> dict[str, tuple[str, Intervention] | None]:
        """Return parent and intervention of every published stage, None for the root stage."""
        names = _names(self.files, f"{self.root}/stages")
        for name in names:
            if name not in self._links and (values := self.read(f"stages/{name}/stage.json")) is not None:
                parent = values.pop("parent")
                self._links[name] = None if parent is None else (parent, Intervention(**values))
        return {name: self._links[name] for name in names if name in self._links}

    def stages(self) -> Iterator[tuple[Stage, tuple[str, Intervention] | None]]:
        """Yield every published stage, refreshed, with its parent's id and intervention."""
        for name, link in self.links().items():
            stage = self._stage(name, 0 if link is None else link[1].iteration + 1)
            stage.refresh()
            yield stage, link

    def read(self, name: str) -> Any:
        """Return the content of a small JSON file of the root; None if it is missing or corrupt."""
        data = read_checked(self.files, f"{self.root}/{name}")
        return None if data is None else json.loads(data)

    def write(self, name: str, values: Any) -> None:
        """Write a small JSON file of the root; raise OSError if it cannot be written."""
        write_checked(self.files, f"{self.root}/{name}", json.dumps(values).encode())

    def read_all(self, prefix: str) -> list[Any]:
        """Return the contents of the root's small JSON files whose names begin so, by name; not of corrupt ones."""
        names = sorted(name for name in _names(self.files, self.root) if name.startswith(prefix))
        return [values for name in names if (values := self.read(name)) is not None]


def roots(tree: Path | str) -> list[str]:
    """Return the ids of the roots under a study's ``tree`` folder."""
    files = files_of(tree)
    try:
        return sorted(name for name in files.names("") if files.size(f"{name}/root.json") is not None)
    except OSError:
        return []
