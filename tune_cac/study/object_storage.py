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
from pathlib import PurePosixPath

from analysis.io.study_files import Layout
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


class _StudyCopy:
    def __init__(self, layout: Layout, storage: str) -> None:
        self._layout, self._storage = layout, storage
        self._here, self._there = DiskFiles(layout.root), files_of(storage)
        self._copied: dict[str, tuple[int, float]] = {}

    def claim(self) -> None:
        """Mark the study as searched from here; UserError where another machine's search runs or writing fails."""
        mark, ray = self._layout.lock.name, self._layout.ray.name
        try:
            if self._there.size(mark) is not None:
                holder = json.loads(self._there.read(mark))
                age_s = time.time() - float(holder["at"])
                if holder["host"] != platform.node() and age_s < _ALIVE_S:
                    raise UserError(
                        f"{self._storage} is being searched on {holder['host']}, process {holder['process']}: wait "
                        f"for it, or {_ALIVE_S - age_s:.0f} s if it has died, or choose another study"
                    )
            self._mark()
            # What Ray writes there only grows, so files of equal size are equal.
            sizes = {file.name: file.bytes for file in self._there.scan(ray)}
        except OSError as error:
            raise UserError(
                f"--results must be storage that can be written, got {self._storage} ({_reason(error)}): {_CHECK}"
            ) from None
        same = (file for file in self._here.scan(ray) if sizes.get(file.name) == file.bytes)
        self._copied |= {file.name: (file.bytes, file.changed_s) for file in same}

    def _mark(self) -> None:
        holder = {"host": platform.node(), "process": os.getpid(), "at": time.time()}
        self._there.write(self._layout.lock.name, (json.dumps(holder).encode(),))

    def copy(self) -> None:
        """Copy what has changed since the last call; raise OSError where the storage fails."""
        for file in self._here.scan(""):
            state = (file.bytes, file.changed_s)
            if self._copied.get(file.name) != state and _is_copied(self._layout, file):
                with suppress(FileNotFoundError):  # replaced meanwhile: the next call finds it
                    self._there.write(file.name, (self._here.read(file.name),))
                    self._copied[file.name] = state
        self._mark()

    def copy_until(self, done: threading.Event) -> None:
        """Copy every `COPY_S` seconds until the event is set; say once where the storage fails."""
        failed = False
        while not done.wait(COPY_S):
            try:
                self.copy()
            except OSError as error:
                if not failed:
                    say(f"warning: {self._storage} cannot be written ({_reason(error)}): the search tries again")
                failed = True
            else:
                if failed:
                    say(f"{self._storage} can be written again")
                failed = False

    def release(self) -> None:
        """Remove the mark."""
        self._there.remove(self._layout.lock.name)


@contextmanager
def copied_to_storage(layout: Layout) -> Iterator[None]:
    """Copy a study into its object storage while the block runs and at its end; nothing for one without.

    UserError: the storage cannot be written at the beginning, or another machine searches the study. DiskError: the
    last copy failed; everything is on this machine.
    """
    storage = layout.read_info().storage
    if not storage:
        yield
        return
    study, done = _StudyCopy(layout, storage), threading.Event()
    study.claim()
    with suppress(OSError):  # the thread says so
        study.copy()
    thread = threading.Thread(target=study.copy_until, args=(done,), daemon=True)
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


def fetch_study(storage: str, layout: Layout) -> bool:
    """Copy a study from object storage to this machine, unless the study here is further; return whether there is one.

    UserError: the storage cannot be read, the folder here is another study's, or both were searched on.
    """
    files, here = files_of(storage), DiskFiles(layout.root)
    try:
        if files.size(layout.info.name) is None:
            return False
        if layout.info.exists():
            if not _is_further(files, layout, storage):
                return True
        elif layout.root.exists() and any(layout.root.iterdir()):
            raise UserError(f"{layout.root} is not empty and holds no study: move it away to fetch {storage}")
        for file in list(files.scan("")):
            if not _is_copied(layout, file):
                continue
            if PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
                raise UserError(f"a file in storage must have a name below its study, got {file.name}: remove it")
            here.write(file.name, (files.read(file.name),))
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
    if not here.startswith(there) and not there.startswith(here):
        raise UserError(
            f"{layout.root} and {storage} were both searched on: move {layout.root} away to go on with the other"
        )
    return len(there) > len(here)


def _is_copied(layout: Layout, file: FileState) -> bool:
    """Return whether a file of a study is copied: not what trials write themselves, and what belongs to a process."""
    *folders, name = PurePosixPath(file.name).parts
    own = file.is_temporary or name.startswith((".write-", ".seen-")) or name.endswith(".lock")
    return not (own or layout.tree.name in folders or any(part.startswith(CHECKPOINT) for part in (*folders, name)))


def _reason(error: OSError) -> str:
    return str(error).splitlines()[0].partition(". Detail")[0][:300]
