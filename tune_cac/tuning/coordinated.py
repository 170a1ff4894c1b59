"""The coordinator of the leases by which the trials of one search share training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainables.stage_tree.coordinator import RayLeases, start_coordinator
from tune_cac.ray_backend.worker_leases import CoordinatorLeases


@contextmanager
def leases_of(tree: Path | str) -> Iterator[str]:
    """Run the coordinator of a stage tree's leases within a Ray session; yield its name."""
    name = f"tune_cac-{hashlib.sha256(str(tree).encode()).hexdigest()[:12]}"
    actor = start_coordinator(name, CoordinatorLeases)
    yield name
    del actor  # it lives as long as this reference


def release_all(claims: str | None, folder: str | None) -> None:
    """Release the leases of a trial that is over, so that no other one waits for it.

    Args:
        claims: name of the coordinator; None for none.
        folder: of the trial, its name there; None for one that never began.
    """
    if claims is not None and folder is not None:
        RayLeases(claims).release_all(folder)
