"""Every random generator of a process, as plain types and tensors that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def generators_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, and of the device's where it is a GPU."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


@contextmanager
def kept_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on as they were: Python's, numpy's, torch's and those of the GPUs.

    Args:
        devices: of which the GPUs count.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = {
        torch.cuda.current_device() if device.index is None else device.index
        for device in devices
        if device.type == "cuda"
    }
    try:
        with torch.random.fork_rng(devices=sorted(gpus)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators into a state of `generators_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
