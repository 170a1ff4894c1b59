"""The coordinator of the leases by which the trials of one search share training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainables.stage_tree.coordinator import start_coordinator
from tune_cac.ray_backend.worker_leases import CoordinatorLeases


@contextmanager
def leases_of(tree: Path | str) -> Iterator[str]:
    """Run the coordinator of a stage tree's leases within a Ray session; yield its name."""
    name = f"tune_cac-{hashlib.sha256(str(tree).encode()).hexdigest()[:12]}"
    actor = start_coordinator(name, CoordinatorLeases)
    yield name
    del actor  # it lives as long as this reference
