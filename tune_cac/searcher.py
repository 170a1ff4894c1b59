"""Ray's OptunaSearch, made to speak of baselines, drops, failures and resumed trials."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search.optuna import OptunaSearch

from analysis.layout import STUDY_NAME
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.metrics import OBJECTIVES, ROW

_ROW_NAMES = tuple(metric.name for metric in ROW)


class StudySearch(OptunaSearch):
    """Suggests from a space and tells Optuna two objectives, accuracy and compute saved, and the drop as constraint.

    - A new study begins with the baseline (no parameters) and the space's starting point.
    - Accuracy dropped by more than allowed makes a trial infeasible. Trials that end before the baseline keep their
      row in the journal at once and are told when the baseline has ended.
    - A trial that failed, or whose values are no finite numbers, is told as FAIL with its error.

    Args:
        space: what is searched.
        context: the run it is searched on.
        base: config of the baseline; spaces override its fields.
        journal: the Optuna journal file.
        allowed_drop: accuracy that may be lost, a fraction.
        seed: of the sampler.
        run_folder: folder of the Ray experiment, relative to the study, for the record.
        checkpoint_every_s: handed to the trials.
        hold: fields of the config that have this value in every trial but the baseline, whatever the space returns.
    """

    def __init__(
        self,
        *,
        space: Space,
        context: SpaceContext,
        base: TrialConfig,
        journal: Path,
        allowed_drop: float,
        seed: int,
        run_folder: str,
        checkpoint_every_s: float,
        hold: Mapping[str, Any] | None = None,
    ) -> None:
        self._search_space = space
        self._context = context
        self._base = base
        self._allowed_drop = allowed_drop
        self._run_folder = run_folder
        self._checkpoint_every_s = checkpoint_every_s
        self._hold = dict(hold or {})
        self._waiting_for_baseline: list[tuple[optuna.Trial, dict[str, Any]]] = []
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed)
            super().__init__(
                space=space.suggest,
                metric=list(OBJECTIVES),
                mode=["max"] * len(OBJECTIVES),
                sampler=sampler,
                study_name=STUDY_NAME,
                storage=storage,
            )
            self.study.set_metric_names(list(OBJECTIVES))

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        return self._ot_study

    def begin(self) -> None:
        """Queue the baseline and the space's starting point; only for a study without trials."""
        self.study.enqueue_trial({}, user_attrs={"role": "baseline"})
        # Called published only where it is: with other values held, nobody published it.
        role = "published" if self._search_space.start_is_published and not self._hold else "search"
        self.study.enqueue_trial(dict(self._search_space.start(self._context)), user_attrs={"role": role})

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """The next trial's config, in the form of `trainables.trial.Trial`."""
        trial = self._ot_trials.get(trial_id) or self.study.ask()
        self._ot_trials[trial_id] = trial
        attrs = trial.user_attrs
        if attrs.get("role") == "baseline":
            values: dict[str, Any] = {"method": "none"}
        else:
            suggested = self._search_space.suggest(trial, self._context)
            values = {"method": self._search_space.method, **plain(suggested), **self._hold}
        config = {**self._base.to_dict(), **values}
        trial.set_user_attr("config", config)
        trial.set_user_attr("folder", f"{self._run_folder}/{trial_folder_name(trial.number)}")
        return {
            "config": config,
            "trial": trial.number,
            "resume_from": attrs.get("resume_from"),
            "checkpoint_every_s": self._checkpoint_every_s,
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna how a trial ended. A failure is told by `tell_failure`, which knows its message."""
        if error or trial_id in self._completed_trials:
            return
        self._completed_trials.add(trial_id)
        trial = self._ot_trials[trial_id]
        row = {name: result[name] for name in _ROW_NAMES if name in result} if result else {}
        missing = [name for name in OBJECTIVES if not _finite(row.get(name))]
        if missing:
            self._tell_fail(trial, f"the trial reported no finite {' and '.join(missing)}")
            return
        trial.set_user_attr("row", row)  # from here on a crash cannot lose the trial
        self._waiting_for_baseline.append((trial, row))
        self._tell_waiting()

    def tell_failure(self, trial_id: str, message: str) -> None:
        """Tell Optuna that a trial raised."""
        if trial_id in self._ot_trials and trial_id not in self._completed_trials:
            self._completed_trials.add(trial_id)
            self._tell_fail(self._ot_trials[trial_id], message)

    def _tell_fail(self, trial: optuna.Trial, message: str) -> None:
        trial.set_user_attr("error", message)
        self.study.tell(trial, state=TrialState.FAIL)
        if trial.user_attrs.get("role") == "baseline":
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        # Told in order of completion once the baseline's accuracy is known; after a failed baseline, without a drop.
        baseline = self._baseline_row()
        if baseline is None and not self._baseline_failed():
            return
        for trial, row in self._waiting_for_baseline:
            tell_complete(self.study, trial, row, baseline, self._allowed_drop)
        self._waiting_for_baseline.clear()

    def _baseline_trials(self) -> list[FrozenTrial]:
        return [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get("role") == "baseline"]

    def _baseline_row(self) -> dict[str, Any] | None:
        return next((t.user_attrs["row"] for t in self._baseline_trials() if "row" in t.user_attrs), None)

    def _baseline_failed(self) -> bool:
        return all(t.state == TrialState.FAIL for t in self._baseline_trials())

    def adopt_unfinished(self, root: Path) -> None:
        """Bring a study that a search left unfinished in order: call before suggesting.

        Trials that ended but were not told are told. Trials that were running are told as FAIL and queued anew with
        the same parameters, to continue from their last checkpoint where there is one.
        """
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self.study, frozen._trial_id)
            attrs = frozen.user_attrs
            if "row" in attrs:
                self._waiting_for_baseline.append((trial, attrs["row"]))
                continue
            again = {"role": attrs.get("role", "search")}
            checkpoint = last_checkpoint(root / attrs["folder"]) if "folder" in attrs else None
            if checkpoint is None:
                checkpoint = attrs.get("resume_from")
            if checkpoint is not None:
                again["resume_from"] = str(Path(checkpoint).resolve())
            self.study.enqueue_trial(frozen.params, user_attrs=again)
            trial.set_user_attr("continued_by", "a later trial with the same parameters")
            trial.set_user_attr("error", "interrupted")
            self.study.tell(trial, state=TrialState.FAIL)
        self._tell_waiting()

    def finished_count(self) -> int:
        """Trials that ended, well or badly; interrupted ones do not count."""
        return sum(
            "row" in t.user_attrs or (t.state == TrialState.FAIL and "continued_by" not in t.user_attrs)
            for t in self.study.get_trials(deepcopy=False)
        )

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles the searcher for a restore that we do not use; our state is the journal.
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal is the searcher's state, and `search --resume` reads it."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Refused: Ray's own restore would lag behind the journal."""
        raise RuntimeError("resume this study with: python -m tune_cac search --resume NAME")


def tell_complete(
    study: optuna.Study,
    trial: optuna.Trial,
    row: dict[str, Any],
    baseline: dict[str, Any] | None,
    allowed_drop: float,
) -> None:
    """Tell a finished trial: its objectives, and the drop beyond the allowed one as constraint (<= 0 is feasible)."""
    if baseline is not None:
        excess = baseline["accuracy"] - row["accuracy"] - allowed_drop
        trial.set_constraint("accuracy_drop", excess if excess > 1e-9 else min(excess, 0.0))
    study.tell(trial, [row[name] for name in OBJECTIVES])


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values in types that JSON gives back, so that a config is the same to Ray, the journal and a resumed search."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def trial_folder_name(number: int) -> str:
    """Name of a trial's folder in its Ray experiment, by Optuna's trial number."""
    return f"trial-{number:05d}"


def last_checkpoint(trial_folder: Path) -> Path | None:
    """The newest complete checkpoint that Ray has put into a trial's folder."""
    from trainables.training.run import CHECKPOINT_FILE

    found = [p for p in trial_folder.glob("checkpoint_*") if (p / CHECKPOINT_FILE).is_file()]
    return max(found, default=None)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
