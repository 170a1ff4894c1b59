"""Process state around a trial: known at its start, put back at its end.

Ray reuses processes from trial to trial, so whatever a trial sets (seeds, environment, default dtype, threads,
backend flags) would otherwise reach the next one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated(*, seed: int, threads: int) -> Iterator[None]:
    """Run with seeded generators, ``threads`` CPU threads, float32 and no ``CAC_*`` variable; restore all of it."""
    environment = dict(os.environ)
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    dtype, thread_count, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic = _determinism()
    precision = torch.get_float32_matmul_precision()
    cudnn = (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    try:
        for name in [name for name in os.environ if name.startswith("CAC_")]:
            del os.environ[name]
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(thread_count)
        torch.set_grad_enabled(gradients)
        if _determinism() != deterministic:  # setting it loads torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.set_float32_matmul_precision(precision)
        (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) = cudnn


def _determinism() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and whether a warning is enough where there are none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
