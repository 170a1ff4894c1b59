"""Budgets that end a search: time, and the compute that it executes."""

from __future__ import annotations

import time
from typing import Any

from ray import tune

from analysis.presentation.markdown_report import full_trainings
from tune_cac.tuning.progress import SearchProgress, duration_text
from tune_cac.tuning.study_searcher import StudySearch


class Budget(tune.Stopper):
    """End a Ray Tune run when its time or its compute is used up.

    When the time is up, running trials are stopped as by Ctrl-C: a resumed search continues them from their last
    checkpoints. When the compute is used up, no further trial begins, and running ones finish, so that somewhat more is
    executed.

    Args:
        searcher: suggests no more trials when the compute is used up.
        progress: counts what is executed.
        time_s: seconds; None for no limit.
        trainings: compute in full trainings; None for no limit.
        begun: when the search began, by `time.monotonic`.
    """

    def __init__(
        self,
        searcher: StudySearch,
        progress: SearchProgress,
        *,
        time_s: float | None,
        trainings: float | None,
        begun: float,
    ) -> None:
        self._searcher, self._progress = searcher, progress
        self._time_s, self._trainings, self._begun = time_s, trainings, begun
        self._time_is_up = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles its stopper for a restore that is not used

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: no trial ends before the others."""
        return False

    def stop_all(self) -> bool:
        """Return whether to stop every trial; Ray asks after each event."""
        if self._cost_is_used_up():
            self._searcher.ask_for(0)
        self._time_is_up = self._time_s is not None and time.monotonic() - self._begun >= self._time_s
        return self._time_is_up

    def _cost_is_used_up(self) -> bool:
        # What a full training costs is known when the baseline has ended.
        known = self._progress.has_baseline
        return self._trainings is not None and known and self._progress.trainings() >= self._trainings

    def reason(self) -> str:
        """Return which budget is used up, as the beginning of a sentence; empty if none is."""
        if self._time_is_up and self._time_s is not None:
            return f"The time budget of {duration_text(self._time_s)} is used up"
        if self._trainings is None or not self._cost_is_used_up() or self._searcher.trials.runs_on():
            return ""  # trials that still run were interrupted by the user
        executed = f"{self._progress.trainings():.1f} executed"
        if self._progress.counts_shares:
            executed += ", by the trials' compute_saved, for the script reports no FLOPs"
        return f"The cost budget of {full_trainings(self._trainings)} is used up ({executed})"
