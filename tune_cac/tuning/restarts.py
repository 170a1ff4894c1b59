"""Trials that are begun again: their worker died, the search was interrupted, or the baseline failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from trainables.errors import TrainingDiverged, UserError
from trainables.storage import is_uri, joined
from tune_cac.study.trial_folder import is_trial_folder, last_checkpoint, last_row
from tune_cac.tuning.optuna_private import live_trial, queued_parameters
from tune_cac.tuning.outcomes.trial_attributes import CHOSEN
from tune_cac.tuning.predefined_trial import PredefinedTrial, as_key
from tune_cac.tuning.study_trials import StudyTrials

#: Errors that the same training would raise again.
_WOULD_FAIL_AGAIN = (TrainingDiverged.__name__, UserError.__name__, "ScriptFailed")
#: Note on a trial that another one continues.
_CONTINUED_BY = "a later trial with the same parameters"


class Restarts:
    """Begin trials again from their last checkpoint.

    Args:
        trials: of the study.
        root: the study's folder.
        place: where its trials keep their checkpoints: its folder, or its URI.
        retries: most restarts of a trial whose worker died, and of a failed baseline; >= 0.
    """

    def __init__(self, trials: StudyTrials, root: Path, place: Path | str, retries: int) -> None:
        self._trials = trials
        self._root = root
        self._place = place
        self.retries = retries
        self._retried: dict[str, int] = {}  # restarts of predefined trials, by their values
        self._checkpoints: dict[str, str] = {}  # of interrupted predefined trials, by their values

    def start_predefined(self, run: PredefinedTrial) -> optuna.Trial:
        """Start a predefined trial, from the checkpoint of an interrupted one if there is any."""
        attrs = {**run.attrs, "given": dict(run.values)}
        if run.key in self._checkpoints:
            attrs["resume_from"] = self._checkpoints[run.key]
        return self._trials.start(attrs)

    def restart(self, trial: optuna.Trial, message: str, *, died: bool, fits_later: bool = False) -> bool:
        """Begin a failed trial again if it may succeed.

        Args:
            trial: the failed trial.
            message: what it raised, or how its worker ended.
            died: whether its worker died.
            fits_later: whether memory ran out and fewer trials will run beside it; no restart is counted then.

        Returns:
            True if it is begun again: queued, or, if predefined, started anew by its values.
        """
        attrs = trial.user_attrs
        given = as_key(attrs["given"]) if "given" in attrs else None
        done = attrs.get("retry", 0) if given is None else self._retried.get(given, 0)
        # Nothing can be searched without the baseline; its error may not occur again.
        needed = given is None and attrs.get("role") == "baseline" and not message.startswith(_WOULD_FAIL_AGAIN)
        if not fits_later and (not (died or needed) or done >= self.retries):
            return False
        retry = done if fits_later else done + 1
        if given is None:
            self._queue(trial.params, attrs, retry=retry)
        else:
            self._retried[given] = retry
            self._keep_checkpoint(attrs)
        trial.set_user_attr("continued_by", _CONTINUED_BY)
        return True

    def retry_baseline(self) -> None:
        """Queue a baseline that failed in an earlier search once more; nothing can be searched without it."""
        baselines = self._trials.baselines()
        if baselines and self._trials.baseline_failed():
            self._queue({}, {"role": "baseline"}, retry=self.retries, continues=baselines[-1].number)

    def adopt_unfinished(self) -> list[tuple[optuna.Trial, dict[str, Any]]]:
        """Report the running trials of an earlier search as FAIL, and begin them again.

        Returns:
            Trials that ended but were not reported to Optuna, with their result rows.
        """
        ended = []
        study = self._trials.study
        for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = live_trial(study, frozen)
            attrs = frozen.user_attrs
            if "row" in attrs:
                ended.append((trial, attrs["row"]))
                continue
            if "given" in attrs:
                self._keep_checkpoint(attrs)
            else:
                self._queue(queued_parameters(frozen), attrs, retry=attrs.get("retry", 0))
            if is_trial_folder(attrs.get("folder")):
                trial.set_user_attr("row_so_far", last_row(self._root / attrs["folder"]))
            trial.set_user_attr("continued_by", _CONTINUED_BY)
            trial.set_user_attr("error", "interrupted")
            study.tell(trial, state=TrialState.FAIL)
        return ended

    def _queue(self, parameters: Mapping[str, Any], attrs: Mapping[str, Any], *, retry: int, **more: Any) -> None:
        kept = {name: attrs[name] for name in CHOSEN if name in attrs}
        again = {"role": attrs.get("role", "search"), **kept, "retry": retry, **more}
        checkpoint = self._checkpoint_of(attrs)
        if checkpoint is not None:
            again["resume_from"] = checkpoint
        if again["role"] == "baseline":
            self._trials.baseline_again = again
        else:
            self._trials.study.enqueue_trial(dict(parameters), user_attrs=again)

    def _checkpoint_of(self, attrs: Mapping[str, Any]) -> str | None:
        """Return the last checkpoint of a trial that did not end, or the one that it began from."""
        known = is_trial_folder(attrs.get("folder"))
        found = last_checkpoint(joined(self._place, attrs["folder"])) if known else None
        return self.own_checkpoint(found or attrs.get("resume_from"))

    def own_checkpoint(self, found: Path | str | None) -> str | None:
        """Return the place of a checkpoint if it lies in the study, whatever its journal says; else None."""
        if found is None:
            return None
        if is_uri(found):
            return (
                str(found)
                if str(found).startswith(str(self._place).partition("?")[0] + "/") and ".." not in str(found)
                else None
            )
        whole = Path(found).resolve()
        return str(whole) if whole.is_relative_to(self._root.resolve()) else None

    def _keep_checkpoint(self, attrs: Mapping[str, Any]) -> None:
        checkpoint = self._checkpoint_of(attrs)
        if checkpoint is not None:
            self._checkpoints[as_key(attrs["given"])] = checkpoint
