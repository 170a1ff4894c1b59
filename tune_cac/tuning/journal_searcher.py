"""A Ray searcher whose state is Optuna's journal, so that Ray's own snapshots of it hold nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.tune.search import Searcher


class JournalSearcher(Searcher):
    """Write nothing for Ray's restore, which would lag behind the journal."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles the searcher for a restore that is not used; the state is the journal

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: the journal is the searcher's state, and `search --resume` reads it."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Raise RuntimeError: Ray's own restore would lag behind the journal."""
        raise RuntimeError("resume this study with: python -m tune_cac search --resume NAME")
