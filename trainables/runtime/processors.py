"""Number of processors that this process may use."""

from __future__ import annotations

import os

from trainables.errors import UserError


def processors() -> int:
    """Return how many processors this process may use (>= 1), which may be fewer than the machine has.

    What a batch system assigns (affinity) and the CPU limit of a container count; ``LOKY_MAX_CPU_COUNT`` lowers it.

    Raises:
        UserError: that variable is no integer.
    """
    from joblib.externals.loky import cpu_count  # joblib.cpu_count is 1 where joblib may start no processes

    try:
        return int(cpu_count())
    except ValueError as error:
        text = os.environ.get("LOKY_MAX_CPU_COUNT")
        raise UserError(f"LOKY_MAX_CPU_COUNT must be an integer, got {text!r}: unset it") from error
