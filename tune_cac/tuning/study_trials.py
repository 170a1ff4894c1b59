"""Queries of a search on the trials of its study: the baseline, begun trials and ended trials."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from analysis.formatting import ROUNDING
from analysis.io.layout import STUDY_NAME
from analysis.metrics.controls import CUT
from trainables.quality import ACCURACY, Quality, allowed_amount
from tune_cac.messages import say
from tune_cac.tuning.optuna_objectives import saved_of_baseline
from tune_cac.tuning.optuna_private import live_trial
from tune_cac.tuning.predefined_trial import as_key

#: Attribute of a study: why its space does nothing or little on its run.
_WHY_LITTLE = "why_little"


def open_study(journal: Path, sampler: optuna.samplers.BaseSampler, quality: Quality = ACCURACY) -> optuna.Study:
    """Open the Optuna study of a journal, or create it.

    Args:
        journal: its file.
        sampler: of its trials.
        quality: the metric, the first objective; the second one is the compute saved.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal.absolute()))),
            sampler=sampler,
            pruner=optuna.pruners.NopPruner(),
            study_name=STUDY_NAME,
            directions=[quality.optuna_direction, "maximize"],
            load_if_exists=True,
        )
        study.set_metric_names([quality.name, "compute_saved"])
    return study


@dataclass(frozen=True, kw_only=True)
class BestSetting:
    """The setting that saves most."""

    saved: float
    """Compute saved, a fraction of that of the baseline."""
    own_saved: float
    """Compute saved, a fraction of that of a dense run of its own length."""
    config: Mapping[str, Any]
    """Fields of its configuration."""


class StudyTrials:
    """Query the trials of one study in the current state of its journal.

    Args:
        study: the Optuna study.
        quality: the metric of its trials.
    """

    def __init__(self, study: optuna.Study, quality: Quality = ACCURACY) -> None:
        self.study = study
        self._quality = quality
        self.baseline_again: dict[str, Any] | None = None
        """Attributes of a baseline to train once more; None if there is none."""
        self._looked_at = 0  # trials whose role is known, which a trial has from its creation
        self._baselines: list[int] = []
        self._baseline_row: dict[str, Any] | None = None
        self._first_waiting = 0  # number of the first trial that may wait in the queue

    def all(self) -> list[FrozenTrial]:
        """Return all trials, in their order."""
        return self.study.get_trials(deepcopy=False)

    def start(self, attrs: dict[str, Any], **parameters: Any) -> optuna.Trial:
        """Add a running trial with these attributes and parameters.

        It is not queued, because another search may take trials from the queue.
        """
        self.study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs, **parameters))
        return live_trial(self.study, self.all()[-1])

    def start_baseline(self) -> optuna.Trial:
        """Start the baseline, first in the queue; a repeated one starts before the trials queued since."""
        if self.baseline_again is None:
            return self.study.ask()
        attrs, self.baseline_again = self.baseline_again, None
        return self.start(attrs)

    def wait(self) -> bool:
        """Return whether trials are queued; a trial that does not wait any more never waits again."""
        later = self.all()[self._first_waiting :]
        waiting = [trial.number for trial in later if trial.state == TrialState.WAITING]
        self._first_waiting = waiting[0] if waiting else self._first_waiting + len(later)
        return bool(waiting)

    def baselines(self) -> list[FrozenTrial]:
        """Return the trials of the baseline: several if it failed and was trained again."""
        trials = self.all()
        new = trials[self._looked_at :]
        self._baselines += [t.number for t in new if t.user_attrs.get("role") == "baseline"]
        self._looked_at = len(trials)
        return [trials[number] for number in self._baselines]

    def baseline_row(self) -> dict[str, Any] | None:
        """Return the baseline's result row; None before it ended."""
        if self._baseline_row is None:
            self._baseline_row = next((t.user_attrs["row"] for t in self.baselines() if "row" in t.user_attrs), None)
        return self._baseline_row

    def baseline_runs(self) -> bool:
        """Return whether a baseline is being trained."""
        return any(t.state == TrialState.RUNNING for t in self.baselines())

    def baseline_failed(self) -> bool:
        """Return whether every baseline failed and none is to be trained again."""
        if self.baseline_row() is not None or self.baseline_again is not None:
            return False
        return all(t.state == TrialState.FAIL for t in self.baselines())

    def baseline_error(self) -> str:
        """Return why the baseline failed, and how often."""
        failures = [t for t in self.baselines() if t.state == TrialState.FAIL]
        times = {1: "", 2: " twice"}.get(len(failures), f" {len(failures)} times")
        return f"the baseline failed{times} ({failures[-1].user_attrs.get('error', 'no message')})"

    def root(self) -> str | None:
        """Return the id of the baseline's root in the stage tree; None if none was recorded."""
        return next((t.user_attrs["root"] for t in self.baselines() if "root" in t.user_attrs), None)

    def settings_are_trained(self) -> bool:
        """Return whether trials other than controls are running, so that the best one is not known yet."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(t.user_attrs.get("role") != "control" for t in running)

    def runs_on(self) -> bool:
        """Return whether begun trials have neither ended nor failed, because Ray was stopped before."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any("row" not in t.user_attrs for t in running)

    def tell_why_little(self, reason: str) -> None:
        """Say, and note in the study, why settings of its space do nothing or little; nothing for an empty text."""
        if reason:
            self.study.set_user_attr(_WHY_LITTLE, reason)
            say(reason)

    @property
    def why_little(self) -> str:
        """Return why settings of the space do nothing or little on this run; empty if that is unknown."""
        return str(self.study.user_attrs.get(_WHY_LITTLE, ""))

    def begun(self) -> set[str]:
        """Return the keys of the predefined trials that were begun and not interrupted."""
        return {
            as_key(t.user_attrs["given"])
            for t in self.all()
            if "given" in t.user_attrs and "continued_by" not in t.user_attrs
        }

    def best(self, allowed_drop: float | str, without: Collection[int] = ()) -> BestSetting | None:
        """Return the setting within the allowed drop that saves most so far; None if none saves anything.

        Args:
            allowed_drop: that may be lost of the metric (`trainables.quality`).
            without: numbers of trials that are no answer.
        """
        baseline = self.baseline_row()
        if baseline is None:
            return None
        quality, reference = self._quality, baseline[self._quality.key]
        most = allowed_amount(allowed_drop, reference) + ROUNDING
        found = [
            BestSetting(
                saved=saved_of_baseline(row, baseline), own_saved=row["compute_saved"], config=t.user_attrs["config"]
            )
            for t in self.all()
            if (row := t.user_attrs.get("row")) is not None
            and t.user_attrs.get("role") != "control"
            and t.number not in without
            and quality.lost(row[quality.key], reference) <= most
        ]
        best = max(found, key=lambda one: one.saved, default=None)
        return best if best is not None and best.saved > 0 else None

    def finished_count(self) -> int:
        """Return how many trials completed or failed, without those that run beside a search.

        Those are controls, cut dense runs and further baselines. Interrupted trials do not count either.
        """
        trials = self.all()
        continued = {t.user_attrs.get("continues") for t in trials} | {(self.baseline_again or {}).get("continues")}
        return sum(
            "row" in t.user_attrs
            or (t.state == TrialState.FAIL and "continued_by" not in t.user_attrs and t.number not in continued)
            for t in trials
            if t.user_attrs.get("role") not in ("control", "baseline", CUT) or "given" not in t.user_attrs
        )
