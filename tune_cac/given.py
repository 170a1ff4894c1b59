"""A search whose trials are all given: what a confirmation trains. Ray, the journal and the tree are a search's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import optuna

from tune_cac.progress import SearchProgress
from tune_cac.searcher import FINISHED, StudySearch, as_key


class GivenRun(Protocol):
    """A trial that is given."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """User attributes of its Optuna trial, the role among them."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Fields of the config that differ from the base, in plain types."""


class GivenSearch(StudySearch):
    """Trains runs in their order; those that the study has already are passed over.

    Args:
        wanted: the runs.
        how: as of `StudySearch`.
    """

    def __init__(self, *, wanted: Sequence[GivenRun], **how: Any) -> None:
        super().__init__(**how)
        self._wanted = list(wanted)

    def missing(self) -> list[GivenRun]:
        """Runs that were not begun, or interrupted."""
        begun = self.begun()
        return [run for run in self._wanted if as_key(run.values) not in begun]

    def _next(self) -> optuna.Trial | str | None:
        missing = self.missing()
        return self._start_given(missing[0].attrs, missing[0].values) if missing else FINISHED

    def _tell_waiting(self) -> None:
        # There are several baselines, and nobody learns from the drop.
        for trial, row in self._waiting_for_baseline:
            self.study.tell(trial, [row[name] for name in ("accuracy", "compute_saved")])
        self._waiting_for_baseline.clear()


class GivenProgress(SearchProgress):
    """Progress without a best so far."""

    def _best_so_far(self) -> str:
        return "confirming"
