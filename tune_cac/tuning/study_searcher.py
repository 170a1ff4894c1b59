"""Ray's OptunaSearch, made to speak of baselines, drops, failures and resumed trials."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from analysis.formatting import ROUNDING
from analysis.io.layout import STUDY_NAME
from analysis.metrics.controls import SHORTER
from search_spaces import Space, SpaceContext
from trainables.compression.model_check import facts_of_run
from trainables.compression.schedule import ModelFacts, read_schedule, resolve
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.metrics import OBJECTIVES, ROW
from trainables.stage_tree.coordinator import RayClaims, start_coordinator
from trainables.stage_tree.store import StageStore
from trainables.workload_options import CACHE_VARIABLE
from tune_cac.messages import say
from tune_cac.study.trial_folder import SPENT, last_checkpoint, last_row, trial_folder_name
from tune_cac.tuning.controls import EQUAL_COMPUTE, random_stops, shorter_trainings
from tune_cac.tuning.optuna_objectives import saved_of_baseline, tell_complete
from tune_cac.tuning.predefined_trial import GivenRun, as_key
from tune_cac.tuning.warm_start.baseline import Learned, asks_for_sensitivities, learn

#: Ray's word for a search that suggests no more.
FINISHED: str = Searcher.FINISHED
_ROW_NAMES = tuple(metric.name for metric in ROW)
#: Settings that do nothing are passed over so often in a row; then one is tried all the same.
_MOST_PASSED_OVER = 50
#: Combinations of values that cannot be are passed over so often in a row; then there seems to be no other.
_MOST_IMPOSSIBLE = 200
#: Errors of a training that would come again.
_WOULD_FAIL_AGAIN = (TrainingDiverged.__name__, UserError.__name__)
#: Attribute of a study whose starting point is queued once the baseline has ended.
_WAITS = "start_waits"
#: Attribute of a study whose space does nothing or little on its run: why.
_WHY_LITTLE = "why_little"
#: Most settings of a study's start that are chosen by replay; at most a third of its trials are.
_MOST_SPREAD = 10


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
        tree: the study's ``tree`` folder.
        sharing: whether trials share training. The baseline's signals are recorded there either way, so that the
            same settings are suggested with and without.
        budget_bytes: most bytes of checkpoints.
        trials: of the study, as planned.
        worker_resources: what each of several workers of a trial has, in Ray's words; None for trials of one process.
        retries: times that a trial whose worker died is begun again, >= 0; so often, too, the baseline that failed.
        repeats: whether training repeats bit for bit, so that the baseline's run proves what others would do.
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
        tree: Path,
        sharing: bool = True,
        budget_bytes: int,
        trials: int,
        worker_resources: Mapping[str, float] | None = None,
        retries: int = 1,
        repeats: bool = True,
    ) -> None:
        self._repeats = repeats
        self._retries = retries
        self._retried: dict[str, int] = {}  # given trials, by their values
        self._worker_resources = None if worker_resources is None else dict(worker_resources)
        self._search_space = space
        self._context = context
        self._base = base
        self._allowed_drop = allowed_drop
        self._run_folder = run_folder
        self._checkpoint_every_s = checkpoint_every_s
        self._hold = dict(hold or {})
        self._tree = tree
        self._sharing = sharing
        self._budget_bytes = budget_bytes
        self._planned = trials
        self._learned: Learned | None = None
        self._claims_name: str | None = None
        self._coordinator: Any = None
        self._rows_so_far: dict[str, dict[str, Any]] = {}
        self._nothing_can_be = ""
        self._model_facts: ModelFacts | None = None  # of a schedule's model, once one is searched
        self._passed_over: list[FrozenTrial] = []  # drawn, and not trained because they do nothing
        self._baseline_again: dict[str, Any] | None = None  # attributes of one that is begun again
        self._start_seed = seed
        self._to_ask: int | None = None
        self._with_controls = False
        self._random: dict[float, list[GivenRun]] = {}
        self._checkpoints: dict[str, str] = {}  # of interrupted trials with given values, by these
        self._waiting_for_baseline: list[tuple[optuna.Trial, dict[str, Any]]] = []
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal.absolute())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler, self._draft_sampler = make_sampler(seed), make_sampler(seed)
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
    def saving(self) -> str | None:
        """Compute that trials are ranked by; None for that of training."""
        return self._base.saving

    @property
    def study(self) -> optuna.Study:
        """The Optuna study."""
        return self._ot_study

    def begin(self) -> None:
        """Queue the baseline and the space's starting point; only for a study without trials.

        A starting point that depends on what the baseline's layers bear is queued when that is known.
        """
        self.study.enqueue_trial({}, user_attrs={"role": "baseline"})
        if asks_for_sensitivities(self._search_space, self._context):
            self.study.set_user_attr(_WAITS, True)
        else:
            self._enqueue_start(self._context)

    def _enqueue_start(self, context: SpaceContext) -> None:
        # Called published only where it is: with other values held, nobody published it.
        role = "published" if self._search_space.start_is_published and not self._hold else "search"
        self.study.enqueue_trial(dict(self._search_space.start(context)), user_attrs={"role": role})

    @contextmanager
    def coordinated(self) -> Iterator[None]:
        """Within a Ray session: trials of this search agree on who trains what."""
        if self._sharing:
            self._claims_name = f"tune_cac-{hashlib.sha256(str(self._tree).encode()).hexdigest()[:12]}"
            self._coordinator = start_coordinator(self._claims_name)  # it lives as long as this reference
        try:
            yield
        finally:
            self._claims_name, self._coordinator = None, None

    def plan(self, trials: int, *, controls: bool = False) -> None:
        """Suggest so many trials and then, if asked for, what of the controls is missing; without a plan, no end."""
        self._to_ask, self._with_controls = trials, controls

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial's config, in the form of `trainables.trial.Trial`.

        None while others have to end first, as the baseline; Ray's word for the end when all that was planned is asked.
        """
        trial = self._ot_trials.get(trial_id)
        if trial is None:
            trial = self._next()
            if trial is None or isinstance(trial, str):
                return trial
        self._ot_trials[trial_id] = trial
        attrs = trial.user_attrs
        baseline = attrs.get("role") == "baseline"
        config = self._config(trial)
        folder = f"{self._run_folder}/{trial_folder_name(trial.number)}"
        trial.set_user_attr("config", config)
        trial.set_user_attr("folder", folder)
        return {
            "config": config,
            "trial": trial.number,
            "folder": str(self._tree.parent / folder),
            "cache": os.environ.get(CACHE_VARIABLE),
            "role": attrs.get("role", "search"),
            "resume_from": attrs.get("resume_from"),
            "checkpoint_every_s": self._checkpoint_every_s,
            "worker_resources": self._worker_resources,
            "sharing": self._sharing_of(folder) if (self._sharing and not _is_shorter(attrs)) or baseline else None,
        }

    def _sharing_of(self, folder: str) -> dict[str, Any]:
        watch = self._hold.get("CAC_WATCH")
        return {
            "tree": str(self._tree),
            "budget_bytes": self._budget_bytes,
            "trials": self._planned if self._sharing else 1,
            "watches": [] if watch is None else [list(watch)],
            "checkpoint_every_s": self._checkpoint_every_s,
            "claims": self._claims_name,
            "holder": folder,
        }

    def _config(self, trial: optuna.Trial) -> dict[str, Any]:
        if "given" in trial.user_attrs:
            values: dict[str, Any] = dict(trial.user_attrs["given"])
        elif trial.user_attrs.get("role") == "baseline":
            values = {"method": "none"}
        else:
            with warnings.catch_warnings():
                # The published defaults may lie where this run's thresholds make no difference.
                warnings.filterwarnings("ignore", message="Fixed parameter .* is out of range")
                suggested = self._search_space.suggest(trial, self._learn().context)
            values = {"method": self._search_space.method, **plain(suggested), **self._hold}
        return {**self._base.to_dict(), **values}

    def _next(self) -> optuna.Trial | str | None:
        if self.gave_up:
            return FINISHED
        if self._to_ask == 0:
            if self._with_controls:
                return self._next_control()
            return None if self._may_begin_again() else FINISHED
        trial = self._ask_for_one_that_can_be()
        if trial is None and self._with_controls:
            return self._next_control(shorter_alone=True)  # which wait for nobody, so that no processor does
        if trial is not None and self._to_ask is not None:
            self._to_ask -= 1
        return trial

    def _ask_for_one_that_can_be(self) -> optuna.Trial | str | None:
        """`_ask`; values of a schedule's marks that cannot stand together are told to Optuna as pruned."""
        for _ in range(_MOST_IMPOSSIBLE):
            trial = self._ask()
            if trial is None or isinstance(trial, str):
                return trial
            reason = self._why_impossible(trial)
            if not reason:
                return trial
            trial.set_user_attr("error", reason)
            self.study.tell(trial, state=TrialState.PRUNED)
        self._nothing_can_be = f"of {_MOST_IMPOSSIBLE} combinations of the marked values none can be, such as: {reason}"
        return FINISHED

    def _why_impossible(self, trial: optuna.Trial) -> str:
        """Return what is wrong with a trial's compression schedule; empty for one that fits the model."""
        config = TrialConfig.from_mapping(self._config(trial))
        if not config.compresses:
            return ""
        if self._model_facts is None:
            self._model_facts = facts_of_run(self._base)
        compatible = bool(config.schedule_compatible)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the trial itself will warn
                read = read_schedule(schedule_of(config), compatible=compatible)
                resolve(read, self._model_facts, compatible=compatible)
        except UserError as error:
            return str(error)
        return ""

    def _next_control(self, *, shorter_alone: bool = False) -> optuna.Trial | str | None:
        shorter_alone = shorter_alone or self._searches_run()
        missing = self.missing_controls(shorter_alone=shorter_alone)
        if missing:
            return self._start_given(missing[0])
        return None if shorter_alone or self._may_begin_again() else FINISHED

    def _may_begin_again(self) -> bool:
        """Return whether a trial is at work that would be begun again if its worker died."""
        return self._retries > 0 and bool(self._ot_trials.keys() - self._completed_trials)

    def _searches_run(self) -> bool:
        """Whether trials are under way from whose results the best one is not known yet."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(t.user_attrs.get("role") != "control" for t in running)

    def missing_controls(self, *, shorter_alone: bool = False) -> list[GivenRun]:
        """Controls that this study wants and has not begun: shorter runs, and random stops of the best's compute.

        Args:
            shorter_alone: leave the random stops out, because the best setting is not known yet.
        """
        if self._base.saving == "inference":
            return []  # controls save training compute
        wanted = shorter_trainings(self._base)
        best = self._best_saved()
        if best > EQUAL_COMPUTE and not shorter_alone and self._search_space.method == "gradskip":
            wanted += self._random_stops(best)
        begun = self.begun()
        return [control for control in wanted if control.key not in begun]

    @property
    def gave_up(self) -> str:
        """Why it suggests no more before all that was planned is asked; empty otherwise."""
        return self._baseline_error() if self._baseline_failed() else self._nothing_can_be

    def _baseline_error(self) -> str:
        failures = [t for t in self._baseline_trials() if t.state == TrialState.FAIL]
        times = {1: "", 2: " twice"}.get(len(failures), f" {len(failures)} times")
        return f"the baseline failed{times} ({failures[-1].user_attrs.get('error', 'no message')})"

    def runs_on(self) -> bool:
        """Whether trials were begun that have neither ended nor failed: Ray was told to stop before."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any("row" not in t.user_attrs for t in running)

    def begun(self) -> set[str]:
        """Keys of the given trials that were begun and not interrupted."""
        return {
            as_key(t.user_attrs["given"])
            for t in self.study.get_trials(deepcopy=False)
            if "given" in t.user_attrs and "continued_by" not in t.user_attrs
        }

    def _best_saved(self) -> float:
        """Most compute saved within the allowed drop so far."""
        baseline = self._baseline_row()
        if baseline is None:
            return 0.0
        rows = [
            t.user_attrs["row"]
            for t in self.study.get_trials(deepcopy=False)
            if "row" in t.user_attrs and t.user_attrs.get("role") != "control"
        ]
        lowest = baseline["accuracy"] - self._allowed_drop - ROUNDING
        return max((saved_of_baseline(row, baseline) for row in rows if row["accuracy"] >= lowest), default=0.0)

    def _random_stops(self, saved: float) -> list[GivenRun]:
        trace = self._learn().trace
        if trace is None:
            return []
        near = round(saved / EQUAL_COMPUTE) * EQUAL_COMPUTE  # a best that is hardly better wants no new ones
        if near not in self._random:
            store = StageStore(self._tree, trace.root)
            try:
                self._random[near] = random_stops(
                    trace, store, self._base, self._context.unit_ends, saved=near, seed=self._base.seed
                )
            except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
                warnings.warn(f"no controls with random stops: {error}", stacklevel=2)
                self._random[near] = []
        return self._random[near]

    def _start_given(self, run: GivenRun) -> optuna.Trial:
        """Begin a trial with its values. It is not queued: what waits in the queue may wait for another search."""
        attrs = {**run.attrs, "given": dict(run.values)}
        if run.key in self._checkpoints:
            attrs["resume_from"] = self._checkpoints[run.key]
        return self._start(attrs)

    def _start(self, attrs: dict[str, Any], **parameters: Any) -> optuna.Trial:
        """A trial with these attributes and parameters that runs."""
        self.study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs, **parameters))
        return optuna.Trial(self.study, self.study.get_trials(deepcopy=False)[-1]._trial_id)

    def _ask(self) -> optuna.Trial | None:
        """The next trial that may do something; None as long as the baseline, which others learn from, is trained."""
        if self._baseline_row() is None:
            return None if self._baseline_runs() else self._ask_for_baseline()
        self._enqueue_spread()
        queued = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if queued or not self._repeats or not self._learn().knows_what_acts:
            return self.study.ask()
        return self._ask_for_one_that_acts()

    def _ask_for_one_that_acts(self) -> optuna.Trial:
        """A setting of the sampler's that does something on the baseline's run.

        It is drawn in a copy of the study, where those that are passed over get the baseline's result, so that the
        sampler turns away from them. The study itself holds what is trained and nothing else.
        """
        draft = optuna.create_study(directions=self.study.directions, sampler=self._draft_sampler)
        for known in (*self.study.get_trials(deepcopy=False), *self._passed_over):
            with suppress(ValueError):  # a starting point may lie outside the ranges, and Optuna refuses it here
                draft.add_trial(known)
        row = self._baseline_row()
        assert row is not None
        for last in range(_MOST_PASSED_OVER, -1, -1):
            drawn = draft.ask()
            if last == 0 or not self._does_nothing(drawn):
                break
            tell_complete(draft, drawn, row, row, self._allowed_drop)
            self._passed_over.append(draft.get_trials(deepcopy=False)[-1])
        return self._start({}, params=drawn.params, distributions=drawn.distributions)

    def _ask_for_baseline(self) -> optuna.Trial:
        """The baseline, the first in the queue; one that is begun again passes what is queued since."""
        if self._baseline_again is None:
            return self.study.ask()
        attrs, self._baseline_again = self._baseline_again, None
        return self._start(attrs)

    def _baseline_runs(self) -> bool:
        return any(t.state == TrialState.RUNNING for t in self._baseline_trials())

    def _learn(self) -> Learned:
        """What the baseline's run tells of this space; nothing where it failed."""
        if self._learned is None:
            root = next((t.user_attrs["root"] for t in self._baseline_trials() if "root" in t.user_attrs), None)
            self._learned = learn(
                self._search_space, self._context, self._tree, base=self._base, hold=self._hold, root=root,
                allowed_drop=self._allowed_drop,
            )  # fmt: skip
        return self._learned

    def _enqueue_spread(self) -> None:
        """Once a study: what the baseline's run suggests to begin with.

        The space's starting point, if it waited for that run, and settings whose predicted outcomes differ, in place of
        the sampler's random start.
        """
        if self.study.user_attrs.get("spread"):
            return
        if self.study.user_attrs.get(_WAITS):
            self._enqueue_start(self._learn().context)
            self.study.set_user_attr(_WAITS, False)
        count = max(1, min(_MOST_SPREAD, self._planned // 3))
        queued = {t.user_attrs.get("start") for t in self.study.get_trials(deepcopy=False)}  # before a crash, here
        starts = self._learn().spread(count, self._start_seed)
        for number, parameters in enumerate(starts):
            if number not in queued:
                self.study.enqueue_trial(parameters, user_attrs={"role": "search", "start": number})
        self._tell_why_little(acts=bool(starts))
        self.study.set_user_attr("spread", True)

    def _tell_why_little(self, *, acts: bool = False) -> None:
        reason = self._learn().why_little(self._start_seed, acts=acts)
        if reason:
            self.study.set_user_attr(_WHY_LITTLE, reason)
            say(reason)

    @property
    def why_little(self) -> str:
        """Why settings of the space do nothing or little on this run; empty where that is not known."""
        return str(self.study.user_attrs.get(_WHY_LITTLE, ""))

    def _does_nothing(self, trial: optuna.Trial) -> bool:
        return self._learn().does_nothing(TrialConfig.from_mapping(self._config(trial)))

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Keep what a trial has executed, in case it fails."""
        self._rows_so_far[trial_id] = {name: result[name] for name in SPENT if name in result}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna how a trial ended. A failure is told by `tell_failure`, which knows its message."""
        if error or trial_id in self._completed_trials:
            return
        self._completed_trials.add(trial_id)
        trial = self._ot_trials[trial_id]
        row = {name: result[name] for name in _ROW_NAMES if name in result} if result else {}
        if trial.user_attrs.get("role") == "baseline" and row.get("stage"):
            trial.set_user_attr("root", row["stage"])  # a run without interventions ends in its root
        if not self._sharing and row:
            row["stage"] = ""  # only the baseline was recorded: there is no tree to be in
        missing = [name for name in OBJECTIVES if not _finite(row.get(name))]
        if missing:
            self._tell_fail(trial, f"the trial reported no finite {' and '.join(missing)}")
            return
        trial.set_user_attr("row", row)  # from here on a crash cannot lose the trial
        self._waiting_for_baseline.append((trial, row))
        self._tell_waiting()

    def tell_failure(self, trial_id: str, message: str, *, died: bool = False) -> bool:
        """Tell Optuna that a trial failed; whether it is begun again, as another trial with the same parameters.

        Args:
            trial_id: Ray's.
            message: what it raised, or how its worker ended.
            died: whether its worker died, which says nothing of the trial: it goes on from its last checkpoint.
        """
        if trial_id not in self._ot_trials or trial_id in self._completed_trials:
            return False
        self._completed_trials.add(trial_id)
        trial = self._ot_trials[trial_id]
        trial.set_user_attr("row_so_far", self._rows_so_far.get(trial_id, {}))
        if self._claims_name is not None and "folder" in trial.user_attrs:
            RayClaims(self._claims_name).release_all(trial.user_attrs["folder"])  # nobody has to wait for it
        again = self._begin_again(trial, message, died)
        self._tell_fail(trial, message)
        return again

    def _begin_again(self, trial: optuna.Trial, message: str, died: bool) -> bool:
        attrs = trial.user_attrs
        given = as_key(attrs["given"]) if "given" in attrs else None
        done = attrs.get("retry", 0) if given is None else self._retried.get(given, 0)
        # Nothing can be searched without the baseline; what it raised may have been a matter of the moment.
        needed = given is None and attrs.get("role") == "baseline" and not message.startswith(_WOULD_FAIL_AGAIN)
        wanted = died or needed
        if not wanted or done >= self._retries:
            return False
        if given is None:
            self._queue_again(trial.params, attrs, retry=done + 1)
            if self._to_ask is not None:
                self._to_ask += 1
        else:
            self._retried[given] = done + 1
            self._keep_checkpoint(attrs)
        trial.set_user_attr("continued_by", "a later trial with the same parameters")
        return True

    def _queue_again(self, parameters: Mapping[str, Any], attrs: Mapping[str, Any], *, retry: int, **more: Any) -> None:
        again = {"role": attrs.get("role", "search"), "retry": retry, **more}
        checkpoint = self._checkpoint_of(attrs)
        if checkpoint is not None:
            again["resume_from"] = checkpoint
        if again["role"] == "baseline":
            self._baseline_again = again
        else:
            self.study.enqueue_trial(dict(parameters), user_attrs=again)

    def _checkpoint_of(self, attrs: Mapping[str, Any]) -> str | None:
        """The last checkpoint of a trial that did not end, or the one that it began from."""
        found = last_checkpoint(self._tree.parent / attrs["folder"]) if "folder" in attrs else None
        found = found or attrs.get("resume_from")
        return None if found is None else str(Path(found).resolve())

    def _keep_checkpoint(self, attrs: Mapping[str, Any]) -> None:
        """A given trial is begun anew by its values, and goes on from there."""
        checkpoint = self._checkpoint_of(attrs)
        if checkpoint is not None:
            self._checkpoints[as_key(attrs["given"])] = checkpoint

    def retry_baseline(self) -> None:
        """Begin a baseline that failed in an earlier search once more: without it nothing can be searched."""
        if not self._baseline_trials() or not self._baseline_failed():
            return
        self._queue_again({}, {"role": "baseline"}, retry=self._retries, continues=self._baseline_trials()[-1].number)

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
        return self._baseline_again is None and all(t.state == TrialState.FAIL for t in self._baseline_trials())

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
            if "given" in attrs:
                self._keep_checkpoint(attrs)
            else:
                # One that was asked for and never suggested has no parameters yet, but those that were queued.
                parameters = frozen.params or frozen.system_attrs.get("fixed_params", {})
                self._queue_again(parameters, attrs, retry=attrs.get("retry", 0))
            if "folder" in attrs:
                trial.set_user_attr("row_so_far", last_row(root / attrs["folder"]))
            trial.set_user_attr("continued_by", "a later trial with the same parameters")
            trial.set_user_attr("error", "interrupted")
            self.study.tell(trial, state=TrialState.FAIL)
        self._tell_waiting()

    def finished_count(self) -> int:
        """Trials that ended, well or badly; interrupted ones and controls do not count."""
        trials = self.study.get_trials(deepcopy=False)
        continued = {t.user_attrs.get("continues") for t in trials} | {(self._baseline_again or {}).get("continues")}
        return sum(
            "row" in t.user_attrs
            or (t.state == TrialState.FAIL and "continued_by" not in t.user_attrs and t.number not in continued)
            for t in trials
            if t.user_attrs.get("role") != "control"
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


def make_sampler(seed: int) -> optuna.samplers.TPESampler:
    """The sampler of settings. Candidates are cheap beside a trial: twice as many as Optuna looks at by itself."""
    return optuna.samplers.TPESampler(multivariate=True, group=True, constant_liar=True, n_ei_candidates=48, seed=seed)


def _is_shorter(attrs: Mapping[str, Any]) -> bool:
    # A run of another length shares nothing with the others, and the tree stays that of one run.
    return attrs.get("control") == SHORTER


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values in types that JSON gives back, so that a config is the same to Ray, the journal and a resumed search."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
