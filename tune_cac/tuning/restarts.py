"""Trials that are begun again from their last checkpoint: their worker died, or the search was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from trainables.storage import is_uri, joined, parent
from tune_cac.study.folder import is_trial_folder, last_checkpoint, last_row
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.trials import CHOSEN, PredefinedTrial, StudyTrials, as_key, live_trial, queued_parameters

#: Note on a trial that another one continues.
_CONTINUED_BY = "a later trial with the same parameters"


class Restarts:
    """Begin trials again from their last checkpoint."""

    def __init__(self, trials: StudyTrials, plan: SearchPlan) -> None:
        self._trials, self._retries = trials, plan.retries
        # The study's folder, and where its trials keep their checkpoints: there, or at its URI.
        self._root, self._place = plan.journal.parent, parent(plan.tree)
        self._retried: dict[str, int] = {}  # restarts of predefined trials, by their values
        self._checkpoints: dict[str, str] = {}  # of interrupted predefined trials, by their values

    def start_predefined(self, run: PredefinedTrial) -> optuna.Trial:
        """Start a predefined trial, from the checkpoint of an interrupted one if there is any."""
        checkpoint = {"resume_from": self._checkpoints[run.key]} if run.key in self._checkpoints else {}
        return self._trials.start({**run.attrs, "given": dict(run.values), **checkpoint})

    def restart(self, trial: optuna.Trial) -> bool:
        """Begin a trial again whose worker died; return False if it was as often as it may be."""
        attrs = trial.user_attrs
        given = as_key(attrs["given"]) if "given" in attrs else None
        done = attrs.get("retry", 0) if given is None else self._retried.get(given, 0)
        if done >= self._retries:
            return False
        if given is not None:
            self._retried[given] = done + 1
        self._begin_again(trial.params, attrs, retry=done + 1)
        trial.set_user_attr("continued_by", _CONTINUED_BY)
        return True

    def retry_baseline(self) -> None:
        """Queue a baseline that failed in an earlier search once more; nothing can be searched without it."""
        baselines = self._trials.baselines()
        if baselines and self._trials.baseline_failed():
            self._begin_again({}, {"role": "baseline"}, retry=self._retries, continues=baselines[-1].number)

    def adopt_unfinished(self) -> list[tuple[optuna.Trial, dict[str, Any]]]:
        """Report running trials of an earlier search as FAIL and begin them again; return those that had ended."""
        ended, study = [], self._trials.study
        for frozen in self._trials.all(TrialState.RUNNING):
            trial, attrs = live_trial(study, frozen), frozen.user_attrs
            if "row" in attrs:
                ended.append((trial, attrs["row"]))
                continue
            self._begin_again(queued_parameters(frozen), attrs, retry=attrs.get("retry", 0))
            if is_trial_folder(attrs.get("folder")):
                trial.set_user_attr("row_so_far", last_row(self._root / attrs["folder"]))
            trial.set_user_attr("continued_by", _CONTINUED_BY)
            trial.set_user_attr("error", "interrupted")
            study.tell(trial, state=TrialState.FAIL)
        return ended

    def _begin_again(self, parameters: Mapping[str, Any], attrs: Mapping[str, Any], *, retry: int, **more: Any) -> None:
        """Queue a trial; of a predefined one, which is missing now, keep the checkpoint."""
        folder = attrs.get("folder")
        # The last checkpoint, or the one that it began from.
        found = last_checkpoint(joined(self._place, str(folder))) if is_trial_folder(folder) else None
        checkpoint = self.own_checkpoint(found or attrs.get("resume_from"))
        if "given" in attrs:
            if checkpoint is not None:
                self._checkpoints[as_key(attrs["given"])] = checkpoint
            return
        kept = {name: attrs[name] for name in CHOSEN if name in attrs}
        again = {"role": attrs.get("role", "search"), **kept, "retry": retry, **more}
        if checkpoint is not None:
            again["resume_from"] = checkpoint
        if again["role"] == "baseline":
            self._trials.baseline_again = again
        elif dict(parameters) not in map(queued_parameters, self._trials.all(TrialState.WAITING)):
            # Else a search that was killed since has queued it.
            self._trials.study.enqueue_trial(dict(parameters), user_attrs=again)

    def own_checkpoint(self, found: Path | str | None) -> str | None:
        """Return the place of a checkpoint if it lies in the study, whatever the journal says; else None."""
        if found is None:
            return None
        if is_uri(found):
            inside = str(found).startswith(str(self._place).partition("?")[0] + "/") and ".." not in str(found)
            return str(found) if inside else None
        whole = Path(found).resolve()
        return str(whole) if whole.is_relative_to(self._root.resolve()) else None
