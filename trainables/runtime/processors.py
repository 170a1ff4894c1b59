"""Number of processors that this process may use."""

from __future__ import annotations


def processors() -> int:
    """Return how many processors this process may use (>= 1), which may be fewer than the machine has.

    What a batch system assigns (affinity) and the CPU limit of a container count; ``LOKY_MAX_CPU_COUNT`` lowers it.
    """
    from joblib import cpu_count  # not needed by most of what imports this

    return int(cpu_count())
