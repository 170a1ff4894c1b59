"""A study in object storage: its files lie on this machine's disk, and are copied there while it is searched.

Optuna's journal is appended to, which object storage cannot do. So everything but the shared training (``tree/``) and
checkpoints, which trials write there themselves, is written here, and copied every `COPY_S` seconds and at the end.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from analysis.io.layout import Layout
from trainables.errors import DiskError, UserError
from trainables.runtime.checkpoint_folder import CHECKPOINT
from trainables.storage import DiskFiles, Files, FileState, files_of
from tune_cac.messages import say

#: Seconds from one copy to the next.
COPY_S = 30.0
#: Seconds after its last copy in which a search counts as running.
_ALIVE_S = 3 * COPY_S
_CHECK = (
    "check the bucket's name, and credentials and endpoint in the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)"
)


class StudyCopy:
    """Copy of a study's files in object storage.

    Args:
        layout: of the study on this machine.
        storage: its URI.
    """

    def __init__(self, layout: Layout, storage: str) -> None:
        self._layout = layout
        self._files = files_of(storage)
        self._copied: dict[str, tuple[int, float]] = {}

    def claim(self) -> None:
        """Mark the study as searched from here.

        Raises:
            UserError: a search on another machine runs on it, or the storage cannot be written.
        """
        name = self._layout.lock.name
        try:
            if self._files.size(name) is not None:
                holder = json.loads(self._files.read(name))
                age_s = time.time() - float(holder["at"])
                if holder["host"] != platform.node() and age_s < _ALIVE_S:
                    raise UserError(
                        f"{self._files.place} is being searched on {holder['host']}, process {holder['process']}: wait "
                        f"for it, or {_ALIVE_S - age_s:.0f} s if it has died, or choose another study"
                    )
            self._mark()
            # What Ray writes there only grows, so files of equal size are equal.
            there = {file.name: file.bytes for file in self._files.scan(self._layout.ray.name)}
        except OSError as error:
            raise UserError(
                f"--results must be storage that can be written, got {self._files.place} ({_reason(error)}): {_CHECK}"
            ) from None
        for file in DiskFiles(self._layout.root).scan(self._layout.ray.name):
            if there.get(file.name) == file.bytes:
                self._copied[file.name] = (file.bytes, file.changed_s)

    def _mark(self) -> None:
        holder = {"host": platform.node(), "process": os.getpid(), "at": time.time()}
        self._files.write(self._layout.lock.name, (json.dumps(holder).encode(),))

    def copy(self) -> None:
        """Copy what has changed since the last call; raise OSError where the storage fails."""
        for file in DiskFiles(self._layout.root).scan(""):
            state = (file.bytes, file.changed_s)
            if self._copied.get(file.name) == state or not _is_copied(self._layout, file):
                continue
            try:
                data = (self._layout.root / file.name).read_bytes()
            except FileNotFoundError:  # replaced meanwhile: the next call finds it
                continue
            self._files.write(file.name, (data,))
            self._copied[file.name] = state
        self._mark()

    def release(self) -> None:
        """Remove the mark."""
        self._files.remove(self._layout.lock.name)


@contextmanager
def copied_to_storage(layout: Layout) -> Iterator[None]:
    """Copy a study into its object storage while the block runs and at its end; nothing for one without.

    Raises:
        UserError: the storage cannot be written at the beginning, or another machine searches the study.
        DiskError: the last copy failed; everything is on this machine.
    """
    storage = layout.read_info().storage
    if not storage:
        yield
        return
    study = StudyCopy(layout, storage)
    study.claim()
    with suppress(OSError):  # as below
        study.copy()
    done = threading.Event()
    thread = threading.Thread(target=_copy_until, args=(study, storage, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        try:
            study.copy()
        except OSError as error:
            raise DiskError(
                f"{storage} cannot be written ({_reason(error)}): the study is whole in {layout.root}; once it can, "
                f"python -m tune_cac search --resume {layout.root} copies it there"
            ) from error
        finally:
            study.release()


def _copy_until(study: StudyCopy, storage: str, done: threading.Event) -> None:
    failed = False
    while not done.wait(COPY_S):
        try:
            study.copy()
            if failed:
                say(f"{storage} can be written again")
            failed = False
        except OSError as error:
            if not failed:
                say(f"warning: {storage} cannot be written ({_reason(error)}): the search goes on and tries again")
            failed = True


def fetch_study(storage: str, layout: Layout) -> bool:
    """Copy a study from object storage to this machine, unless the study here is further; return whether there is one.

    Raises:
        UserError: the storage cannot be read, the folder here is another study's, or both were searched on.
    """
    files = files_of(storage)
    try:
        if files.size(layout.info.name) is None:
            return False
        if layout.info.exists():
            if not _is_further(files, layout, storage):
                return True
        elif layout.root.exists() and any(layout.root.iterdir()):
            raise UserError(f"{layout.root} is not empty and holds no study: move it away to fetch {storage}")
        for file in list(files.scan("")):
            if _is_copied(layout, file):
                _write_below(layout.root, file.name, files.read(file.name))
    except OSError as error:
        raise UserError(f"{storage} cannot be read ({_reason(error)}): {_CHECK}") from None
    return True


def _is_further(files: Files, layout: Layout, storage: str) -> bool:
    """Return whether the study in storage has what the one here lacks."""
    if layout.read_info().storage != storage:
        raise UserError(f"{layout.root} holds another study than {storage}: move it away, or give other --results")
    name = layout.journal.name
    there = files.read(name) if files.size(name) is not None else b""
    here = layout.journal.read_bytes() if layout.journal.exists() else b""
    if here.startswith(there):
        return False
    if there.startswith(here):
        return True
    raise UserError(
        f"{layout.root} and {storage} were both searched on: move {layout.root} away to go on with the other"
    )


def _is_copied(layout: Layout, file: FileState) -> bool:
    """Return whether a file of a study is copied: not what trials write themselves, and what belongs to a process."""
    parts = PurePosixPath(file.name).parts
    own = file.is_temporary or parts[-1].startswith((".write-", ".seen-")) or parts[-1].endswith(".lock")
    return not (own or layout.tree.name in parts[:-1] or any(part.startswith(CHECKPOINT) for part in parts))


def _write_below(folder: Path, name: str, data: bytes) -> None:
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise UserError(f"a file in storage must have a name below its study, got {name}: remove it")
    DiskFiles(folder).write(name, (data,))


def _reason(error: OSError) -> str:
    return str(error).splitlines()[0].partition(". Detail")[0][:300]
