"""Interface of all image sources: encoded images and labels, by split."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.storage import atomic_write

# --- JSON cache for expensive results ---------------------------------------------------------------------------------


def cached_json(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the file, or else compute it and write it there.

    Two processes may do this at once: each computes the same, and the file is written atomically. A file that is no
    JSON object counts as missing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    facts = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(facts).encode())
    return facts


# --- Digest that distinguishes sets of image files --------------------------------------------------------------------

#: Up to this many bytes in all, files are read as a whole.
WHOLE_BYTES = 10**9
#: Above that, this many bytes of a file's beginning and of its end are read, and its modification time counts.
END_BYTES = 10**6


def content_digest(source: Source, cache: Path) -> str:
    """Return the SHA-256 of the splits, file names, sizes and contents of a source, in hexadecimal.

    Equal for a copy elsewhere if all files together have at most `WHOLE_BYTES`. Contents are read once for a set of
    sizes and modification times, and the digest is kept in ``cache``. Images outside the Parquet files that refer to
    them are not read.
    """
    listed, total_bytes = [], 0
    signature = hashlib.sha256(str(source.root.resolve()).encode(errors="surrogateescape"))
    for split, path in _files(source):
        facts = path.stat()
        name = str(path.relative_to(source.root)) if path != source.root else path.name
        listed.append((split, name, facts.st_size, facts.st_mtime_ns, path))
        total_bytes += facts.st_size
        signature.update(repr((split, name, facts.st_size, facts.st_mtime_ns, facts.st_ino)).encode())

    def read() -> dict[str, str]:
        digest = hashlib.sha256()
        for split, name, size_bytes, written_ns, path in listed:
            digest.update(repr((split, name, size_bytes)).encode())
            if total_bytes <= WHOLE_BYTES:
                digest.update(_whole(path))
            else:
                digest.update(repr(written_ns).encode())
                digest.update(_ends(path, size_bytes))
        return {"sha256": digest.hexdigest()}

    return str(cached_json(cache / "digests" / f"{signature.hexdigest()[:32]}.json", read)["sha256"])


def _files(source: Source) -> Iterable[tuple[str, Path]]:
    for split in sorted(source.files):
        for path in source.files[split]:
            yield split, path


def _whole(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def _ends(path: Path, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        beginning = file.read(END_BYTES)
        file.seek(max(0, size_bytes - END_BYTES))
        return hashlib.sha256(beginning + file.read(END_BYTES)).digest()


# --- Interface of all image sources -----------------------------------------------------------------------------------

#: The names of splits, and their names on disk in data sets. The first found is used.
SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}

#: An image file's bytes, or its path.
Encoded = bytes | Path


class ImageSplit(ABC):
    """One split's images, still encoded, in a fixed order."""

    labels: NDArray[np.int64]
    """(N,) class numbers, not yet compared with the number of classes."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def place(self, index: int) -> str:
        """Return the location of image number ``index`` for messages: the file, and its row there."""

    @abstractmethod
    def encoded(self, indices: Sequence[int]) -> list[Encoded]:
        """Return the images with these numbers.

        Raises:
            UserError: there is no image in a row.
        """

    @abstractmethod
    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        """Yield all images in order, at most ``size`` at a time, with the number of the first; read only these.

        Raises:
            UserError: there is no image in a row.
        """


class Source(ABC):
    """Files that hold images and labels."""

    root: Path
    """The path given by the user."""
    files: dict[str, list[Path]]
    """Files by split, in the order of their images."""

    @abstractmethod
    def open(self) -> dict[str, ImageSplit]:
        """Open the splits and read their labels.

        Raises:
            UserError: a file that cannot be read, a missing column, an invalid label.
        """

    @abstractmethod
    def class_names(self) -> list[str] | None:
        """Return the names of the classes, by class number; None where the files have none."""
