"""Files of a study, on a disk or in object storage (``s3://``, ``gs://``, ...), by names relative to a folder.

Names have ``/`` between their parts. A file is written whole or not at all. Loads pyarrow only for object storage.
Credentials and endpoint come from the environment of each process (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...),
as for every program of that storage: they are never written into a study.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from trainables.errors import UserError

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_uri(place: str | Path) -> bool:
    """Return whether a place is a URI of object storage and not a path."""
    return _URI.match(str(place)) is not None


def joined(place: str | Path, *names: str) -> str | Path:
    """Return the place of a name within a place; a URI keeps its query.

    >>> joined("s3://bucket/studies?scheme=http", "s", "tree")
    's3://bucket/studies/s/tree?scheme=http'
    """
    if not is_uri(place):
        return Path(place).joinpath(*names)
    head, mark, query = str(place).partition("?")
    return "/".join((head.rstrip("/"), *names)) + mark + query


def parent(place: str | Path) -> str | Path:
    """Return the place that holds another one."""
    if not is_uri(place):
        return Path(place).parent
    head, mark, query = str(place).partition("?")
    return head.rstrip("/").rpartition("/")[0] + mark + query


@dataclass(frozen=True, kw_only=True)
class FileState:
    """One file of a folder."""

    name: str
    """Relative to the storage's folder."""
    bytes: int
    changed_s: float
    """Time of its last change, in seconds since the epoch, by the storage's clock."""

    @property
    def base_name(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition("/")[2]

    @property
    def is_temporary(self) -> bool:
        """Return whether it is being written, or was left by a crash."""
        return self.base_name.startswith(".") and self.base_name.endswith(TEMPORARY_SUFFIX)


class Files:
    """The files below one folder, here of a disk. Every method raises OSError where the storage fails."""

    def __init__(self, place: Path) -> None:
        self.place: str | Path = place
        self._root = place

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, files and folders; none where there is no such folder."""
        try:
            return os.listdir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def scan(self, folder: str) -> Iterator[FileState]:
        """Yield all files below a folder; none where there is no such folder."""
        for here, _, names in os.walk(self._root / folder, onerror=_raise_unless_gone):
            for path in (Path(here, name) for name in names):
                try:
                    state = path.stat()
                except FileNotFoundError:  # removed by another process
                    continue
                name = path.relative_to(self._root).as_posix()
                yield FileState(name=name, bytes=state.st_size, changed_s=state.st_mtime)

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None without such a file."""
        try:
            return (self._root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str) -> bytes:
        """Return a file's content; raise FileNotFoundError without such a file."""
        return (self._root / name).read_bytes()

    def read_if(self, name: str, is_right: Callable[[bytes], bool]) -> bytes | None:
        """Return a file's content as `read`; remove the file and return None if it is not right."""
        path = self._root / name
        with path.open("rb") as file:
            data = file.read()
            if is_right(data):
                return data
            remove_what_was_read(path, os.fstat(file.fileno()))
        return None

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write or replace a file, and missing folders."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.writelines(parts)

    def remove(self, name: str) -> None:
        """Remove a file; ignore errors, such as a file that is gone."""
        with suppress(OSError):
            (self._root / name).unlink()


#: The files of a disk, whatever else there is.
DiskFiles = Files


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


class ObjectFiles(Files):
    """The files of a folder in object storage, through pyarrow; UserError where that cannot open the URI."""

    def __init__(self, place: str) -> None:
        import pyarrow as pa
        from pyarrow.fs import FileSystem

        self.place = place
        try:
            self._system, folder = FileSystem.from_uri(place)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            raise UserError(
                f"storage must be a URI that pyarrow can open, such as s3://bucket/studies, got {place}: {reason}"
            ) from None
        self._folder = folder.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder

    def _found(self, folder: str, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._path(folder), allow_not_found=True, recursive=recursive)
        return list(self._system.get_file_info(selector))

    def names(self, folder: str) -> list[str]:
        return [info.base_name for info in self._found(folder, recursive=False)]

    def scan(self, folder: str) -> Iterator[FileState]:
        for info in self._found(folder, recursive=True):
            if info.is_file:
                name = info.path.removeprefix(self._folder).lstrip("/")
                yield FileState(name=name, bytes=info.size, changed_s=info.mtime_ns / 1e9)

    def size(self, name: str) -> int | None:
        info = self._system.get_file_info(self._path(name))
        return info.size if info.is_file else None

    def read(self, name: str) -> bytes:
        with self._system.open_input_stream(self._path(name)) as file:
            return bytes(file.read())

    def read_if(self, name: str, is_right: Callable[[bytes], bool]) -> bytes | None:
        data = self.read(name)
        if not is_right(data):
            self.remove(name)
            return None
        return data

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        with self._system.open_output_stream(self._path(name)) as file:
            for part in parts:
                file.write(part)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._system.delete_file(self._path(name))


_object_files = cache(ObjectFiles)


def files_of(place: str | Path) -> Files:
    """Return the files below a folder or URI; those of a URI are opened once a process."""
    return _object_files(str(place)) if is_uri(place) else Files(Path(place))


def copy_files(source: Files, target: Files, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy all files whose names are wanted; raise OSError where the storage fails."""
    for file in source.scan(""):
        if wanted(file.name) and not file.is_temporary:
            target.write(file.name, (source.read(file.name),))


def check_place(place: str, option: str) -> None:
    """Raise UserError for a URI of ``option`` without a folder, or with credentials, which would be kept in files."""
    parts = urlsplit(place)
    if "@" in parts.netloc or re.search(r"(?i)(secret|token|password|access_key)[^=&]*=", parts.query):
        shown = f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise UserError(
            f"{option} must have no credentials in it, got {shown}: set them in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), which every node needs, or give the nodes a role"
        )
    if not parts.netloc or ".." in PurePosixPath(parts.path).parts:
        raise UserError(f"{option} must be a folder or a URI such as s3://bucket/studies, got {place}")


def remove_what_was_read(path: Path, read: os.stat_result) -> None:
    """Remove a file unless another has taken its place; while it is open, no other can have its inode number."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), read):
            path.unlink()


# --- Atomic writing of one file; the only place of the project that writes beside a file and renames ------------------

#: Temporary names begin with a dot and end with this suffix.
TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` at the end of the block, and leaves it unchanged if the block fails.

    A reader sees the old file, the new one or none, also after this process was killed. A machine that crashes may lose
    blocks of a renamed file, which only a checksum detects (`trainables.stage_tree.store`).

    Raises:
        OSError: it cannot be written (disk full, file too large, read-only); the temporary file is removed.
    """
    # The random part distinguishes threads, and processes of equal number on two nodes. The name is cut, since the
    # file system limits its length.
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


# --- Free space of a disk that checkpoints, which can be lost, leave to the journal and the results of a search -------

#: Bytes that stay free, or this share of a disk for which they are much. The journal of 10,000 trials has some 30 MB.
_RESERVE_BYTES, _RESERVE_SHARE = 256 * 2**20, 0.1


def lacking_bytes(folder: Path, size_bytes: int) -> int:
    """Return how many bytes of the reserve would be taken by writing this many in a folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    reserve = min(_RESERVE_BYTES, int(_RESERVE_SHARE * disk.total))
    return max(reserve + size_bytes - disk.free, 0)
