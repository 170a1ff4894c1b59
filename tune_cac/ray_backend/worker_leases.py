"""The leases of `trainables` under a name of `tune_cac`, as `worker_classes` says why, without torch and Ray Tune."""

from __future__ import annotations

from trainables.stage_tree.leases import Leases


class CoordinatorLeases(Leases):
    """The leases that the coordinator of a search grants."""
