"""Probabilities of holding on another seed, written after every trial: a search that is killed leaves them behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import tune

if TYPE_CHECKING:
    from analysis.io.layout import Layout
    from tune_cac.tuning.study_searcher import StudySearch


class HoldsWriter(tune.Callback):
    """Write `StudyInfo.holds` after each trial.

    Args:
        layout: of the study.
        searcher: that knows them, where it chooses outcomes.
    """

    def __init__(self, layout: Layout, searcher: StudySearch) -> None:
        self._layout, self._searcher = layout, searcher

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles its callbacks for a restore that we do not use; a searcher cannot be pickled.
        return {}

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Write them once the searcher has the trial's result."""
        write_holds(self._layout, self._searcher)


def write_holds(layout: Layout, searcher: StudySearch) -> None:
    """Write the probabilities of all trained outcomes into `study.json`, unless it has the same."""
    if searcher.outcomes is None:
        return
    holds = {str(trial): share for trial, share in searcher.outcomes.holds().items()}
    if (info := layout.read_info()).holds != holds:
        layout.write_info(replace(info, holds=holds))
