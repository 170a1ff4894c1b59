"""Digest that distinguishes sets of image files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from trainables.workloads.images.json_cache import cached_json
from trainables.workloads.images.source import Source

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
