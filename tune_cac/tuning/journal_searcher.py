"""A Ray searcher whose state is Optuna's journal, so that Ray's own snapshots of it hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher


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
