"""Number of processors that this process may use."""

from __future__ import annotations

import os

from trainables.errors import UserError


def processors() -> int:
    """Return how many processors this process may use (>= 1), by affinity, the container's limit, LOKY_MAX_CPU_COUNT.

    Raises:
        UserError: that variable is no integer.
    """
    from joblib.externals.loky import cpu_count  # joblib.cpu_count is 1 where joblib may start no processes

    try:
        return int(cpu_count())
    except ValueError as error:
        text = os.environ.get("LOKY_MAX_CPU_COUNT")
        raise UserError(f"LOKY_MAX_CPU_COUNT must be an integer, got {text!r}: unset it") from error
