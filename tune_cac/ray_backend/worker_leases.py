"""The leases of `trainables` under a name of `tune_cac`, for Ray's workers; why, says `worker_classes`.

A module of its own, because its process needs neither torch nor Ray Tune, which take seconds to import.
"""

from __future__ import annotations

from trainables.stage_tree.leases import Leases


class CoordinatorLeases(Leases):
    """The leases that the coordinator of a search grants."""
