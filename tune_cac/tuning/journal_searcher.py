"""A Ray searcher whose state is Optuna's journal, so that Ray's own snapshots of it hold nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from trainables.stage_tree.coordinator import RayLeases, start_coordinator
from tune_cac.ray_backend.worker_leases import CoordinatorLeases


class JournalSearcher(Searcher):
    """Write nothing for Ray's restore, which would lag behind the journal."""

    unwritten: OSError | None = None
    """The error of a journal that could not be written when a trial ended, which Ray takes for that trial's failure."""

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Keep in `unwritten` what the block raises where the journal cannot be written."""
        try:
            yield
        except OSError as error:
            self.unwritten = error
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles the searcher for a restore that is not used; the state is the journal

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the journal is the searcher's state, and `search --resume` reads it."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Raise RuntimeError: Ray's own restore would lag behind the journal."""
        raise RuntimeError("resume this study with: python -m tune_cac search --resume NAME")


# --- The coordinator of the leases by which the trials of one search share training -----------------------------------


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
