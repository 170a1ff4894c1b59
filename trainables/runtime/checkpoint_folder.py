"""Checkpoint folders of a trial: names, and those in object storage."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.storage import DiskFiles, copy_files, files_of, is_uri, lacking_bytes

if TYPE_CHECKING:
    from torch import nn

#: The only file of a checkpoint folder.
CHECKPOINT_FILE = "run.pt"
#: Beginning of the folder's name; Ray's own, too.
CHECKPOINT = "checkpoint_"


def read_state(file: Any) -> dict[str, Any]:
    """Read a state that `torch.save` wrote (a path or a file), with every tensor on the CPU or a GPU as it was.

    The GPU may be another one. Adam counts its steps in CPU tensors; if they were moved to the GPU with the others,
    each would make every step wait for it.
    """
    import torch  # not in processes that only name folders

    def where_it_was(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage

    state: dict[str, Any] = torch.load(file, weights_only=True, map_location=where_it_was)
    return state


def checkpoint_name(epoch: int) -> str:
    """Return the name of the checkpoint folder after so many epochs."""
    return f"{CHECKPOINT}{epoch:06d}"


def has_room(model: nn.Module, folder: str | Path) -> bool:
    """Return whether a disk has room for a checkpoint beside what the search's results need; warn if it has not."""
    # A momentum and a second moment may stand beside each parameter.
    size_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    if not lacking_bytes(Path(folder), size_bytes):
        return True
    warnings.warn(f"a checkpoint was not kept, training goes on: the disk of {folder} is nearly full", stacklevel=2)
    return False


def write_checkpoint(run: Any, trial_folder: str) -> None:
    """Write a run's checkpoint into a trial's folder in object storage, then remove earlier ones.

    Raises:
        OSError: it cannot be written; an earlier one stays.
    """
    files, name = files_of(trial_folder), checkpoint_name(run.epoch)
    with tempfile.TemporaryDirectory(prefix="tune_cac-") as here:
        run.save(here)
        for file in DiskFiles(Path(here)).scan(""):
            files.write(f"{name}/{file.name}", (Path(here, file.name).read_bytes(),))
    for old in files.scan(""):
        if old.name.startswith(CHECKPOINT) and not old.name.startswith(f"{name}/"):
            files.remove(old.name)


@contextmanager
def on_disk(folder: str) -> Iterator[str]:
    """Yield a checkpoint folder on this machine, a copy of one in object storage; OSError if it cannot be read."""
    if not is_uri(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tune_cac-") as here:
        copy_files(files_of(folder), DiskFiles(Path(here)))
        yield here
