"""Checkpoint file: its name, and how it is read."""

from __future__ import annotations

from typing import Any

import torch

#: The only file of a checkpoint folder.
CHECKPOINT_FILE = "run.pt"


def read_state(file: Any) -> dict[str, Any]:
    """Read a state that `torch.save` wrote (a path or a file), with every tensor on the CPU or a GPU as it was.

    The GPU may be another one. Adam counts its steps in CPU tensors; if they were moved to the GPU with the others,
    each would make every step wait for it.
    """
    state: dict[str, Any] = torch.load(file, weights_only=True, map_location=where_it_was)
    return state


def where_it_was(storage: Any, location: str) -> Any:
    """Return the storage on the CPU, or on this process's current GPU if it was on a GPU; for `torch.load`."""
    return storage.cuda() if location.startswith("cuda") else storage
