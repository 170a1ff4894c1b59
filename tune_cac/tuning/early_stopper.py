"""Early ends of a search's trials (`early_ending`): their qualities, which ones Ray stops, and what Optuna is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import optuna
from optuna.trial import TrialState
from ray import tune
from ray.tune.result import DONE

from analysis.formatting import percent
from analysis.quality_words import drop_text
from trainables.config import TrialConfig
from tune_cac.tuning.early_ending import Curve, Lead, lead_over
from tune_cac.tuning.optuna_objectives import saved_of_baseline
from tune_cac.tuning.outcomes.trial_attributes import ENDED_EARLY, EPOCHS, PREDICTED
from tune_cac.tuning.study_trials import StudyTrials

#: Attribute of a finished trial: (epoch, quality) of its rows.
_CURVE = "curve"


class EarlyStopper(tune.Stopper):
    """End trials whose saving was predicted, as `lead_over` says.

    A row that executed nothing never ends a trial: what is known already costs nothing. Qualities of finished trials
    are attributes of Optuna's study, so a resumed search has them; a trial from before the option was given has none.

    Args:
        trials: of the study.
        base: config of the baseline.
        running: Optuna's trials by Ray's id, until they are told.
    """

    def __init__(self, trials: StudyTrials, base: TrialConfig, running: Mapping[str, optuna.Trial]) -> None:
        self._trials, self._quality, self._epochs, self._running = trials, base.quality, base.epochs, running
        self._qualities: dict[str, dict[int, float]] = {}  # by Ray's id, then by epoch
        self._executed: dict[str, int] = {}  # FLOPs by Ray's id
        self._finished: dict[int, Curve] = {}  # by number
        self._leads: dict[str, Lead] = {}  # by Ray's id, for which trials end

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles its stopper for a restore that is not used

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether to stop a trial after its row."""
        trial = self._running.get(trial_id)
        if trial is None:
            return False
        before = self._executed.get(trial_id, 0)
        self._executed[trial_id] = executed = int(result.get("search_flops") or 0)
        qualities = self._qualities.setdefault(trial_id, {})
        value = result.get(self._quality.key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            qualities[result["epoch"]] = value
        saved = trial.user_attrs.get(PREDICTED)
        if saved is None or executed == before or result.get(DONE):
            return False
        epochs = trial.user_attrs.get(EPOCHS, self._epochs)
        curve = Curve(trial=trial.number, epochs=epochs, saved=saved, quality=qualities)
        lead = lead_over(curve, self.finished(), self._quality)
        if lead is not None:
            self._leads[trial_id] = lead
        return lead is not None

    def stop_all(self) -> bool:
        """Return False: the others go on."""
        return False

    def finished(self) -> list[Curve]:
        """Return the runs that finished, as far as their qualities are known."""
        baseline = self._trials.baseline_row()
        for trial in self._trials.all() if baseline is not None else []:
            attrs = trial.user_attrs
            if trial.number not in self._finished and baseline is not None and "row" in attrs and _CURVE in attrs:
                self._finished[trial.number] = Curve(
                    trial=trial.number,
                    epochs=attrs["config"][EPOCHS],
                    saved=saved_of_baseline(attrs["row"], baseline),
                    quality=dict(attrs[_CURVE]),
                    may_answer=attrs.get("role") != "control",
                )
        return list(self._finished.values())

    def why(self, trial_id: str) -> str:
        """Return in words why a trial ends early; empty for one that does not."""
        if (lead := self._leads.get(trial_id)) is None:
            return ""
        return (
            f"ended early after epoch {lead.epoch}: trial {lead.trial}, which saves as much, was ahead by "
            f"{drop_text(lead.amount, self._quality)}, and until the end leads change by "
            f"{drop_text(lead.noise, self._quality)}"
        )

    def tell(self, trial_id: str, trial: optuna.Trial, row: Mapping[str, Any]) -> bool:
        """Report a trial that ended early to Optuna as pruned; note the qualities of another one.

        Args:
            trial_id: Ray's.
            trial: Optuna's.
            row: its last.

        Returns:
            Whether it ended early.
        """
        qualities, lead = self._qualities.pop(trial_id, {}), self._leads.get(trial_id)
        if lead is None:
            trial.set_user_attr(_CURVE, sorted(qualities.items()))
            return False
        trial.set_user_attr("row_so_far", dict(row))
        trial.set_user_attr("error", f"{self.why(trial_id)}; predicted to save {percent(trial.user_attrs[PREDICTED])}")
        trial.set_user_attr(ENDED_EARLY, asdict(lead))
        self._trials.study.tell(trial, state=TrialState.PRUNED)
        return True
