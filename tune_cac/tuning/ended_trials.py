"""Ended trials of a study, as Optuna is told of them: a trial is judged against the baseline, and so after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from trainables.quality import Quality
from tune_cac.tuning.option_baselines import OptionBaselines
from tune_cac.tuning.optuna_objectives import missing_objectives, tell_complete

#: A trial of Optuna's study and its result row.
Ended = tuple[optuna.Trial, dict[str, Any]]


class EndedTrials:
    """Report trials as they end; rows that come before the baseline's wait for it.

    Args:
        study: Optuna's.
        baselines: of the study; None where trials are judged against none, and wait for none.
        quality: the metric that they are judged by.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
    """

    def __init__(
        self, study: optuna.Study, baselines: OptionBaselines | None, quality: Quality, allowed_drop: float | str
    ) -> None:
        self._study, self._baselines, self._quality, self._allowed_drop = study, baselines, quality, allowed_drop
        self._waiting: list[Ended] = []

    def tell(self, trial: optuna.Trial, row: dict[str, Any]) -> None:
        """Report a trial's result row; as FAIL if its objectives are not finite.

        Raises:
            OSError: the journal cannot be written.
        """
        if missing := missing_objectives(row, self._quality):
            self.tell_failure(trial, f"the trial reported no finite {' and '.join(missing)}")
            return
        trial.set_user_attr("row", row)  # from here on a crash cannot lose the trial
        self.adopt([(trial, row)])

    def tell_failure(self, trial: optuna.Trial, message: str) -> None:
        """Report a trial as FAIL; if it was a baseline, those that wait for it are reported, too."""
        trial.set_user_attr("error", message)
        self._study.tell(trial, state=TrialState.FAIL)
        if trial.user_attrs.get("role") == "baseline":
            self.adopt([])

    def adopt(self, ended: Sequence[Ended]) -> None:
        """Report trials whose rows are in the journal, and all that waited until now."""
        self._waiting += ended
        if self._baselines is not None:
            self._waiting = self._baselines.tell_judged(self._waiting, self._allowed_drop)
            return
        for trial, row in self._waiting:
            tell_complete(self._study, trial, row, None, self._allowed_drop, self._quality)
        self._waiting = []
