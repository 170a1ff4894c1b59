"""Process state around a trial: defined at its start, restored at its end."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# --- State of every random generator of a process ---------------------------------------------------------------------


def cpu_generators() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of Python's, numpy's and torch's generators, for `set_cpu_generators`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_cpu_generators(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Set Python's, numpy's and torch's generators."""
    python, numpy, torch_state = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_state)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of Python, numpy, torch and, on a GPU, of the device; those of other GPUs stay."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _gpu_generator(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def captured_generators(device: torch.device) -> Callable[[], None]:
    """Return a function that sets the generators to what they are now; quicker than `generators_state`."""
    states, gpu = cpu_generators(), _gpu_generator(device)

    def restore() -> None:
        set_cpu_generators(states)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)

    return restore


@contextmanager
def kept_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the GPUs among the devices after the block."""
    restores = [captured_generators(device) for device in {*devices, torch.device("cpu")}]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators as plain types and tensors, for ``torch.load(weights_only=True)``."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": _gpu_generator(device),
    }


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to a state of `generators_state`."""
    version, internal, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    numpy = (name, keys.cpu().numpy().astype(np.uint32), *rest)
    set_cpu_generators(((version, tuple(internal.tolist()), gauss), numpy, state["torch"].cpu()))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


# --- Process state around a trial -------------------------------------------------------------------------------------


@contextmanager
def isolated(*, seed: int, threads: int) -> Iterator[None]:
    """Run with seeded generators, ``threads`` CPU threads, float32 and no ``CAC_*`` variable, and restore all of it."""
    state = ProcessState()
    state.begin(seed=seed, threads=threads)
    try:
        yield
    finally:
        state.restore()


class ProcessState:
    """The process state that a trial may change, saved at construction.

    For uses that outlive a ``with`` block. Unlike a context manager made from a generator, an object that is dropped
    restores nothing: the garbage collector would do so in the middle of another trial's training.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._generators = cpu_generators()
        self._cuda_generators = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._dtype, self._threads = torch.get_default_dtype(), torch.get_num_threads()
        self._gradients, self._deterministic = torch.is_grad_enabled(), _determinism()
        self._precision = torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn
        self._cudnn = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)

    def begin(self, *, seed: int, threads: int) -> None:
        """Seed the generators, set threads and float32, and remove the ``CAC_*`` variables."""
        for name in [name for name in os.environ if name.startswith("CAC_")]:
            del os.environ[name]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        set_cpu_generators(self._generators)
        if self._cuda_generators is not None:
            torch.cuda.set_rng_state_all(self._cuda_generators)
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(self._gradients)
        if _determinism() != self._deterministic:  # setting it loads torch's compiler, which takes seconds
            enabled, warn_only = self._deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_float32_matmul_precision(self._precision)
        cudnn = torch.backends.cudnn
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self._cudnn


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
