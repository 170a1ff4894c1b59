"""Process state around a trial: defined at its start, restored at its end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from trainables.runtime.generators import cpu_generators, set_cpu_generators


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
        """Restore everything that was saved."""
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
    """Return whether deterministic algorithms are required, and whether a warning is enough where there are none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
