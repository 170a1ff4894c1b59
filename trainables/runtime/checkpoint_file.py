"""The file of a checkpoint: its name, and how it is read."""

from __future__ import annotations

from typing import Any

import torch

#: The one file of a checkpoint folder.
CHECKPOINT_FILE = "run.pt"


def read_state(file: Any) -> dict[str, Any]:
    """A state as `torch.save` wrote it (a path or a file), every tensor where it was, if on another GPU.

    Adam counts its steps in CPU tensors. Moved to the GPU with the others, each would make every step wait for it.
    """
    state: dict[str, Any] = torch.load(file, weights_only=True, map_location=where_it_was)
    return state


def where_it_was(storage: Any, location: str) -> Any:
    """For `torch.load`: on the CPU or the GPU, as it was; which GPU is the process's matter."""
    return storage.cuda() if location.startswith("cuda") else storage
