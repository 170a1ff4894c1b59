"""Trials of a study: queries on them, and their reports to Optuna."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from analysis.formatting import ROUNDING
from analysis.io.study_files import STUDY_NAME
from analysis.metrics.ranking import CUT
from trainables.metrics import OBJECTIVES
from trainables.quality import ACCURACY, Quality, allowed_amount
from trainables.savings import TIME, ranked_saving, share_saved
from tune_cac.messages import say
from tune_cac.tuning.plan import SearchPlan

# --- Attributes of an Optuna trial that tell which outcome it trains; a trial that is begun again keeps them ----------

#: Identity of the outcome as it was predicted when it was chosen (`Outcome.identity`); or that none was predicted.
OUTCOME, UNPREDICTED = "outcome", "unpredicted"
#: Epochs of the run, a parameter, too, and those of the full run; only of a trial that is shorter than the full run.
EPOCHS, OF_EPOCHS = "epochs", "of_epochs"
#: Compute that the outcome is predicted to save, a fraction of that of the full run (`Outcome.saved`).
PREDICTED = "predicted_saved"
CHOSEN = (OUTCOME, UNPREDICTED, EPOCHS, OF_EPOCHS, PREDICTED)


@dataclass(frozen=True, kw_only=True)
class PredefinedTrial:
    """A trial whose values are given instead of suggested: a baseline, a control, or a run of a confirmation."""

    attrs: Mapping[str, Any]  # user attributes of its Optuna trial, the role among them
    values: Mapping[str, Any]  # fields of the config that differ from the baseline's, in plain types

    @property
    def key(self) -> str:
        """Return a text that is equal for runs of equal values."""
        return as_key(self.values)


def as_key(values: Any) -> str:
    """Return values as a text that can be compared."""
    return json.dumps(values, sort_keys=True)


# --- Private names of Optuna; tests/tune_cac/test_private_names.py has all that are relied on, each with a canary -----


def live_trial(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """Return a trial that another process began, or that was added as running, as one that `Study.ask` returns."""
    return optuna.Trial(study, trial._trial_id)


def queued_parameters(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, or those it was queued with if it was never suggested."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


# --- Report of a finished trial to Optuna: two objectives and the constraint on the drop of its metric ----------------

#: Constraint violation of a control, larger than any drop.
_NEVER = 1e30


def tell_complete(
    study: optuna.Study, trial: optuna.Trial, row: dict[str, Any], baseline: dict[str, Any] | None,
    allowed_drop: float | str, quality: Quality = ACCURACY,
) -> None:  # fmt: skip
    """Report a finished trial: its objectives, and the loss beyond the allowed one as constraint (<= 0 is feasible)."""
    if baseline is not None:
        drop = quality.lost(row["quality"], baseline["quality"])
        excess = drop - allowed_amount(allowed_drop, baseline["quality"])
        trial.set_constraint(quality.drop, excess if excess > 1e-9 else min(excess, 0.0))
    if trial.user_attrs.get("role") == "control":
        trial.set_constraint("control", _NEVER)  # good ones would displace settings
    saved = saved_of_row(row, trial.user_attrs.get("config", {}).get("saving"), baseline)
    study.tell(trial, [{**row, "compute_saved": saved}[name] for name in OBJECTIVES])


def saved_of_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Return a row's savings relative to the baseline's budget, or to its own if one of them has no FLOPs."""
    executed, dense = row["executed_flops"], baseline["dense_flops"]
    own: float = row["compute_saved"]
    return share_saved(executed, dense) if executed is not None and dense and row["dense_flops"] != dense else own


def saved_of_row(row: Mapping[str, Any], saving: str | None, baseline: Mapping[str, Any] | None) -> float:
    """Return a row's savings of the compute that its trial is ranked by, relative to the baseline if there is one."""
    found = {"time_saved": 0.0, **row}
    if baseline is not None:
        found["compute_saved"] = saved_of_baseline(row, baseline)
        if saving == TIME:
            found["time_saved"] = share_saved(row["train_time_s"], baseline["train_time_s"])
    return float(ranked_saving(saving, lambda name: found.get(name) or 0.0))


def missing_objectives(row: Mapping[str, Any], quality: Quality) -> list[str]:
    """Return the objectives that are missing from a result row or not finite."""
    values = {quality.name if name == "quality" else name: row.get(name) for name in OBJECTIVES}
    return [name for name, value in values.items() if not (isinstance(value, (int, float)) and math.isfinite(value))]


# --- Trials of a study ------------------------------------------------------------------------------------------------

_WHY_LITTLE, _OPTIONS = "why_little", "workload_options"


def open_study(journal: Path, sampler: optuna.samplers.BaseSampler, quality: Quality = ACCURACY) -> optuna.Study:
    """Open the Optuna study of a journal file, or create it: its objectives are the metric and the compute saved."""
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

    trial: int  # number of its trial
    saved: float  # compute saved, a fraction of that of the baseline
    lost: float  # loss of the metric against the baseline on the study's seed
    is_within: bool  # whether that is no more than the allowed one
    config: Mapping[str, Any]  # fields of its configuration


class StudyTrials:
    """The trials of one study in the current state of its journal, and the reports of those that end.

    A trial is judged against the baseline, and so reported after it; its row enters the journal at once. If the space
    varies options of the workload, each combination of their values has a baseline of its own, which is trained beside
    the first trial of its combination.
    """

    def __init__(self, study: optuna.Study, plan: SearchPlan, *, judges: bool = True) -> None:
        self.study = study
        self.baseline_again: dict[str, Any] | None = None  # attributes of a baseline to train once more
        self._quality, self._allowed_drop, self._judges = plan.base.quality, plan.allowed_drop, judges
        self._options = frozenset(plan.space.options)
        self._first_options = list(plan.base.options)
        self._first = self.combination({_OPTIONS: self._first_options})
        self._waiting: list[tuple[optuna.Trial, dict[str, Any]]] = []  # ended before their baselines, with their rows

    def all(self, *states: TrialState) -> list[FrozenTrial]:
        """Return all trials, or those in these states, in their order."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of trials and of ended ones; while both stay, nothing new is known."""
        trials = self.all()
        return len(trials), sum(t.state.is_finished() or "row" in t.user_attrs for t in trials)

    def start(self, attrs: Mapping[str, Any], **parameters: Any) -> optuna.Trial:
        """Add a running trial with these attributes and parameters."""
        self.study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=dict(attrs), **parameters))
        return live_trial(self.study, self.all()[-1])

    def start_baseline(self) -> optuna.Trial:
        """Start the baseline, first in the queue; a repeated one starts before the trials queued since."""
        if self.baseline_again is None:
            return self.study.ask()
        attrs, self.baseline_again = self.baseline_again, None
        return self.start(attrs)

    def has_unfinished(self) -> bool:
        """Return whether trials count as running although Ray was stopped."""
        return any("row" not in t.user_attrs for t in self.all(TrialState.RUNNING))

    def settings_are_trained(self) -> bool:
        """Return whether trials other than controls are running, so that the best one is not known yet."""
        return any(t.user_attrs.get("role") != "control" for t in self.all(TrialState.RUNNING))

    def begun(self) -> set[str]:
        """Return the keys of the predefined trials that were begun and not interrupted."""
        attrs = [t.user_attrs for t in self.all()]
        return {as_key(one["given"]) for one in attrs if "given" in one and "continued_by" not in one}

    def finished_count(self) -> int:
        """Return how many trials completed or failed, without controls, cut dense runs and further baselines."""
        trials = self.all()
        continued = {t.user_attrs.get("continues") for t in trials} | {(self.baseline_again or {}).get("continues")}
        return sum(
            "row" in t.user_attrs
            or (t.state == TrialState.FAIL and "continued_by" not in t.user_attrs and t.number not in continued)
            for t in trials
            if t.user_attrs.get("role") not in ("control", "baseline", CUT) or "given" not in t.user_attrs
        )

    def settings(self, *, saving: str | None = None) -> list[BestSetting]:
        """Return the settings that save something, what saves most first.

        ``saving`` is what they are ranked by, None for training.
        """
        ended = (t for t in reversed(self.baselines()) if "row" in t.user_attrs)
        baselines = {self._combination_of(t): t.user_attrs["row"] for t in ended}
        found = []
        for trial in self.all():
            row, config = trial.user_attrs.get("row"), trial.user_attrs.get("config", {})
            baseline = baselines.get(self.combination(config))
            if row is None or baseline is None or trial.user_attrs.get("role") == "control":
                continue
            lost, saved = self._quality.lost(row["quality"], baseline["quality"]), saved_of_row(row, saving, baseline)
            if saved > 0:
                within = lost <= allowed_amount(self._allowed_drop, baseline["quality"]) + ROUNDING
                found.append(
                    BestSetting(
                        trial=trial.number, saved=saved, lost=lost, config=config, is_within=bool(within)
                    )
                )  # fmt: skip
        return sorted(found, key=lambda one: (-one.saved, one.lost))

    def tell_why_little(self, reason: str) -> None:
        """Say, and note in the study, why settings of its space do nothing or little, if there is a reason."""
        if reason:
            self.study.set_user_attr(_WHY_LITTLE, reason)
            say(reason)

    @property
    def why_little(self) -> str:
        """Return why settings of the space do nothing or little on this run; empty if that is unknown."""
        return str(self.study.user_attrs.get(_WHY_LITTLE, ""))

    # --- baselines ---

    def combination(self, config: Mapping[str, Any]) -> str:
        """Return the searched options of a trial as NAME=VALUE texts; empty if the space varies none."""
        return " ".join(text for text in config.get(_OPTIONS, ()) if text.partition("=")[0] in self._options)

    def _combination_of(self, baseline: FrozenTrial) -> str:
        return self.combination({_OPTIONS: baseline.user_attrs.get("given", {}).get(_OPTIONS, self._first_options)})

    def baselines(self, config: Mapping[str, Any] | None = None) -> list[FrozenTrial]:
        """Return the baselines, or those of a trial's combination: several if one failed and was trained again."""
        found = [t for t in self.all() if t.user_attrs.get("role") == "baseline"]
        if config is None:
            return found
        wanted = self.combination(config)
        return [t for t in found if self._combination_of(t) == wanted]

    def baseline_row(self, config: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the result row of the first baseline, or of that of a trial's combination; None before it ended."""
        return next((t.user_attrs["row"] for t in self.baselines(config) if "row" in t.user_attrs), None)

    def baseline_failed(self, config: Mapping[str, Any] | None = None) -> bool:
        """Return whether the first baseline, or that of a trial's combination, failed and is not trained again."""
        found = self.baselines(config)
        if config is None or self.combination(config) == self._first:
            ends = self.baseline_row() is None and self.baseline_again is None
            return ends and all(t.state == TrialState.FAIL for t in found)
        return any(t.state == TrialState.FAIL and "continued_by" not in t.user_attrs for t in found[-1:])

    def why_useless(self, config: Mapping[str, Any]) -> str:
        """Return why a trial could not be judged, because the baseline of its combination failed; else empty."""
        if not self._options or not self.baseline_failed(config):
            return ""
        error = self.baselines(config)[-1].user_attrs.get("error", "no message")
        return f"the baseline of {self.combination(config)} failed ({error})"

    def missing_baselines(self) -> list[PredefinedTrial]:
        """Return the baselines that begun trials need and that were not begun, or were interrupted."""
        if not self._options:
            return []
        begun = {self._combination_of(t) for t in self.baselines() if "continued_by" not in t.user_attrs}
        found: dict[str, PredefinedTrial] = {}
        for trial in self.all():
            config = trial.user_attrs.get("config")
            ended_badly = trial.state in (TrialState.FAIL, TrialState.PRUNED)
            if config is not None and not ended_badly and self.combination(config) not in begun:
                values = {"method": "none", _OPTIONS: list(config.get(_OPTIONS, ()))}
                run = PredefinedTrial(attrs={"role": "baseline"}, values=values)
                found.setdefault(run.key, run)
        return list(found.values())

    def root(self) -> str | None:
        """Return the id of the baseline's root in the stage tree; None if none was recorded."""
        return next((t.user_attrs["root"] for t in self.baselines() if "root" in t.user_attrs), None)

    # --- reports of trials that end ---

    def report(self, trial: optuna.Trial, row: dict[str, Any]) -> None:
        """Report a trial's result row, as FAIL if its objectives are not finite; OSError if it cannot be written."""
        if missing := missing_objectives(row, self._quality):
            self.report_failure(trial, f"the trial reported no finite {' and '.join(missing)}")
            return
        trial.set_user_attr("row", row)  # from here on a crash cannot lose the trial
        self.report_ended([(trial, row)])

    def report_failure(self, trial: optuna.Trial, message: str) -> None:
        """Report a trial as FAIL; if it was a baseline, those that wait for it are reported, too."""
        trial.set_user_attr("error", message)
        self.study.tell(trial, state=TrialState.FAIL)
        if trial.user_attrs.get("role") == "baseline":
            self.report_ended([])

    def report_ended(self, ended: Sequence[tuple[optuna.Trial, dict[str, Any]]]) -> None:
        """Report trials whose rows are in the journal, and all that waited for their baselines until now."""
        waiting, self._waiting = [*self._waiting, *ended], []
        for trial, row in waiting:
            config = trial.user_attrs.get("config", {})
            baseline = self.baseline_row(config) if self._judges else None
            if self._judges and baseline is None:
                if not self.baseline_failed(config):
                    self._waiting.append((trial, row))
                    continue
                if self._options:
                    trial.set_constraint("no_baseline", 1.0)  # it cannot be judged, so it is no good one either
            tell_complete(self.study, trial, row, baseline, self._allowed_drop, self._quality)
