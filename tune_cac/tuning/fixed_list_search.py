"""A search over a fixed list of trials, for a confirmation; Ray, journal and tree are used as in any search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from trainables.errors import TrainingDiverged
from tune_cac.tuning.ended_trials import EndedTrials
from tune_cac.tuning.predefined_trial import PredefinedTrial, as_key
from tune_cac.tuning.progress import SearchProgress
from tune_cac.tuning.study_searcher import FINISHED, StudySearch


class FixedListSearch(StudySearch):
    """Train a list of runs in order, without those that the study already has.

    Args:
        wanted: the runs.
        how: arguments of `StudySearch`.
    """

    def __init__(self, *, wanted: Sequence[PredefinedTrial], **how: Any) -> None:
        super().__init__(**how)
        self.outcomes = None  # none is chosen, and runs of several seeds say nothing of other seeds to it
        self._wanted = list(wanted)
        self._again = self._failed_before()
        # There are several baselines, and no sampler uses the constraint.
        self._ended = EndedTrials(self.study, None, self.quality, how["allowed_drop"])

    def _failed_before(self) -> set[str]:
        """Return the keys of runs that failed in an earlier call, as when memory ran out, unless they diverged."""
        keys: dict[str, bool] = {}
        for trial in self.study.get_trials(deepcopy=False):
            attrs = trial.user_attrs
            if "given" in attrs and "continued_by" not in attrs:
                diverged = str(attrs.get("error", "")).startswith(TrainingDiverged.__name__)
                keys[as_key(attrs["given"])] = trial.state == TrialState.FAIL and not diverged
        return {key for key, failed in keys.items() if failed}

    def missing(self) -> list[PredefinedTrial]:
        """Return the runs that were not begun, were interrupted, or failed in an earlier call."""
        begun = self.trials.begun() - self._again
        return [run for run in self._wanted if run.key not in begun]

    def about_left(self) -> tuple[int, int]:
        return len(self.missing()) + len(self._running), 0

    def _next(self) -> optuna.Trial | str | None:
        missing = self.missing()
        if not missing:
            return None if self._running else FINISHED  # a worker may die, and its run begins again
        self._again.discard(missing[0].key)
        return self.restarts.start_predefined(missing[0])


class FixedListProgress(SearchProgress):
    """Progress without a best setting so far."""

    def _is_further_baseline(self, role: str) -> bool:
        return False  # every run of the list counts

    def _best_so_far(self) -> str:
        return "confirming"
