"""Queries of a search on the trials of its study: the baseline, begun trials and ended trials."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from analysis.formatting import ROUNDING
from analysis.io.layout import STUDY_NAME
from analysis.metrics.ranking import CUT
from search_spaces import Space
from trainables.config import TrialConfig
from trainables.metrics import OBJECTIVES, current_row
from trainables.quality import ACCURACY, Quality, allowed_amount
from trainables.savings import TIME, ranked_saving, share_saved
from tune_cac.messages import say

# --- A trial whose values are given instead of suggested: a control of a search, or a run of a confirmation -----------


@dataclass(frozen=True, kw_only=True)
class PredefinedTrial:
    """Values of a trial, and the attributes recorded for it."""

    attrs: Mapping[str, Any]
    """User attributes of its Optuna trial, the role among them."""
    values: Mapping[str, Any]
    """Fields of the config that differ from the baseline's, in plain types."""

    @property
    def key(self) -> str:
        """Return a text that is equal for runs of equal values."""
        return as_key(self.values)


def as_key(values: Any) -> str:
    """Return given values as a text that can be compared."""
    return json.dumps(values, sort_keys=True)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in types that JSON preserves, so that Ray, the journal and a resumed search see the same config."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


# --- Queries of a search on the trials of its study -------------------------------------------------------------------


# --- The private names of Optuna and Ray that this project relies on, each with a canary test -------------------------
# Code that uses a private name is here; facts about private formats are at their place of use and are listed here:
#
# | private name | used in | for |
# |---|---|---|
# | ``optuna.trial.FrozenTrial._trial_id`` | `live_trial` | trials that another process began |
# | the system attribute ``fixed_params`` of a queued trial | `queued_parameters` | to queue it again |
# | ``optuna.storages.journal._storage.JournalOperation`` | `analysis.io.journal` | reading a journal without Optuna |
# | ``optuna.storages.journal._file.LOCK_FILE_SUFFIX`` | `tune_cac.study.folder` | removing a dead process's lock |
# | ``ray._private.ray_constants.ENABLE_RAY_CLUSTER`` | `tune_cac.ray_backend.session` | services on loopback alone |
# | ``ray.tune.logger.TBXLoggerCallback._trial_writer``, ``_trial_result`` | `tune_cac.ray_backend.tensorboard` | rows |
#
# tests/tune_cac/test_private_names.py fails if one of them changes, or if another one is used.


def live_trial(study: optuna.Study, trial: FrozenTrial) -> optuna.Trial:
    """Return a running trial of a study as an object that can suggest values and take attributes and results.

    Optuna makes one only in `Study.ask`; a trial that another process began, or that was added as running, has none.
    """
    return optuna.Trial(study, trial._trial_id)


def queued_parameters(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, or those it was queued with if it was never suggested."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


# --- Report of a finished trial to Optuna: two objectives and the constraint on the drop of its metric ----------------

#: Constraint violation of a control, larger than any drop.
_NEVER = 1e30


def tell_complete(
    study: optuna.Study,
    trial: optuna.Trial,
    row: dict[str, Any],
    baseline: dict[str, Any] | None,
    allowed_drop: float | str,
    quality: Quality = ACCURACY,
) -> None:
    """Report a finished trial: its objectives, and the loss beyond the allowed one as constraint (<= 0 is feasible).

    The row of a shorter run holds savings relative to its own budget; savings relative to the baseline's budget are
    reported. A control is never feasible: a sampler cannot learn from it, and good controls would displace settings.
    """
    if baseline is not None:
        row = {**row, "compute_saved": saved_of_baseline(row, baseline)}
    row = {**row, "compute_saved": saved_of_row(row, trial.user_attrs.get("config", {}).get("saving"), baseline)}
    if baseline is not None:
        drop = quality.lost(row["quality"], baseline["quality"])
        excess = drop - allowed_amount(allowed_drop, baseline["quality"])
        trial.set_constraint(quality.drop, excess if excess > 1e-9 else min(excess, 0.0))
    if trial.user_attrs.get("role") == "control":
        trial.set_constraint("control", _NEVER)
    study.tell(trial, [row[name] for name in OBJECTIVES])


def saved_of_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Return a row's savings relative to the baseline's budget, or to its own if one of them has no FLOPs."""
    executed, dense = row["executed_flops"], baseline["dense_flops"]
    own: float = row["compute_saved"]
    return share_saved(executed, dense) if executed is not None and dense and row["dense_flops"] != dense else own


def saved_of_row(row: Mapping[str, Any], saving: str | None, baseline: Mapping[str, Any] | None = None) -> float:
    """Return a row's savings of the compute that its trial is ranked by; time is that of the baseline's row."""
    time = 0.0
    if saving == TIME and baseline is not None:
        time = share_saved(row["train_time_s"], baseline["train_time_s"])
    return ranked_saving(saving, row["compute_saved"], float(row.get("inference_saved") or 0.0), time)


def missing_objectives(row: Mapping[str, Any], quality: Quality) -> list[str]:
    """Return the objectives that are missing from a result row or not finite."""
    missing = [name for name in OBJECTIVES if not _finite(row.get(name))]
    return [quality.name if name == "quality" else name for name in missing]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# --- Ended trials of a study, as Optuna is told of them: a trial is judged against the baseline, and so after it

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


# --- Baselines of a study whose space varies options of the workload: one for each combination of their values
# A trial is judged against the training without the method under the same options, and against no other. The study's
# first baseline has the options of the space's starting point; the others are trained beside the first trial of their
# combination, once, and do not count among the trials that were asked for.


_OPTIONS = "workload_options"


class OptionBaselines:
    """Queries on the baselines of a study; with a space that varies no options there is one.

    Args:
        trials: of the study.
        space: what is searched.
        base: config of the first baseline.
    """

    def __init__(self, trials: StudyTrials, space: Space, base: TrialConfig) -> None:
        self._trials, self._quality = trials, base.quality
        self._names = frozenset(space.options)
        self._first = list(base.options)

    def combination(self, config: Mapping[str, Any]) -> str:
        """Return the searched options of a trial as NAME=VALUE texts; empty if the space varies none."""
        return " ".join(text for text in config.get(_OPTIONS, ()) if text.partition("=")[0] in self._names)

    def _all_of(self, config: Mapping[str, Any]) -> list[FrozenTrial]:
        """Return the baselines of a trial's combination: several if one failed and was trained again."""
        wanted = self.combination(config)
        return [t for t in self._trials.baselines() if self._combination_of(t) == wanted]

    def _combination_of(self, baseline: FrozenTrial) -> str:
        return self.combination({_OPTIONS: baseline.user_attrs.get("given", {}).get(_OPTIONS, self._first)})

    def row_of(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result row of the baseline of a trial's combination; None before it ended."""
        if not self._names:
            return self._trials.baseline_row()
        return next((t.user_attrs["row"] for t in self._all_of(config) if "row" in t.user_attrs), None)

    def failed(self, config: Mapping[str, Any]) -> bool:
        """Return whether the baseline of a trial's combination failed and is not trained again."""
        if self.combination(config) == self.combination({_OPTIONS: self._first}):
            return self._trials.baseline_failed()
        there = self._all_of(config)
        return bool(there) and all(
            t.state == TrialState.FAIL and "continued_by" not in t.user_attrs for t in there[-1:]
        )

    def tell_judged(
        self, waiting: Iterable[tuple[optuna.Trial, dict[str, Any]]], allowed_drop: float | str
    ) -> list[tuple[optuna.Trial, dict[str, Any]]]:
        """Report to Optuna, in order, the ended trials whose baseline ended, too; return the others.

        A trial whose baseline failed is reported without the constraint on its drop.

        Args:
            waiting: trials with their result rows.
            allowed_drop: that may be lost of the metric (`trainables.quality`).
        """
        left = []
        for trial, row in waiting:
            config = trial.user_attrs.get("config", {})
            baseline = self.row_of(config)
            if baseline is None and not self.failed(config):
                left.append((trial, row))
                continue
            if baseline is None and self._names:
                trial.set_constraint("no_baseline", 1.0)  # it cannot be judged, so it is no good one either
            tell_complete(self._trials.study, trial, row, baseline, allowed_drop, self._quality)
        return left

    def why_useless(self, config: Mapping[str, Any]) -> str:
        """Return why a trial could not be judged, because the baseline of its combination failed; else empty."""
        if not self._names or not self.failed(config):
            return ""
        error = self._all_of(config)[-1].user_attrs.get("error", "no message")
        return f"the baseline of {self.combination(config)} failed ({error})"

    def missing(self) -> list[PredefinedTrial]:
        """Return the baselines that begun trials need and that were not begun, or were interrupted."""
        if not self._names:
            return []
        found: dict[str, PredefinedTrial] = {}
        begun = {self._combination_of(t) for t in self._trials.baselines() if "continued_by" not in t.user_attrs}
        for trial in self._trials.all():
            config = trial.user_attrs.get("config")
            if config is None or trial.state in (TrialState.FAIL, TrialState.PRUNED):
                continue
            if self.combination(config) not in begun:
                values = {"method": "none", _OPTIONS: list(config.get(_OPTIONS, ()))}
                run = PredefinedTrial(attrs={"role": "baseline"}, values=values)
                found.setdefault(run.key, run)
        return list(found.values())


# --- Queries of a search on the trials of its study -------------------------------------------------------------------

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
        for trial in self.all():
            if "row" in trial.user_attrs:  # perhaps of an earlier version
                trial.user_attrs["row"] = current_row(trial.user_attrs["row"])

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
        quality, reference = self._quality, baseline["quality"]
        most = allowed_amount(allowed_drop, reference) + ROUNDING
        found = [
            BestSetting(
                saved=saved_of_baseline(row, baseline), own_saved=row["compute_saved"], config=t.user_attrs["config"]
            )
            for t in self.all()
            if (row := t.user_attrs.get("row")) is not None
            and t.user_attrs.get("role") != "control"
            and t.number not in without
            and quality.lost(row["quality"], reference) <= most
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
