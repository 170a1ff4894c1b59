"""The search algorithm that Ray asks for trials: baseline, settings and controls of one Optuna study."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher

from analysis.formatting import plural
from analysis.metrics.ranking import CUT
from search_spaces import SpaceContext
from trainables.compression.schedule import ModelFacts, read_schedule, resolve
from trainables.compression.scheduler import facts_of_run
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig, wrapped_seed
from trainables.errors import TrainingDiverged, UserError
from trainables.metrics import OBJECTIVES, ROW_KEYS
from trainables.storage import is_uri, joined, parent
from tune_cac.study.folder import SPENT, is_trial_folder, last_checkpoint, last_row, trial_folder_name
from tune_cac.tuning.controls import RANDOM_RUNS, StudyControls
from tune_cac.tuning.draft_study import draft_of
from tune_cac.tuning.grid_walk import GridWalk
from tune_cac.tuning.journal_searcher import JournalSearcher, leases_of, release_all
from tune_cac.tuning.memory_concurrency import MemoryConcurrency
from tune_cac.tuning.outcomes.outcome_queue import OutcomeQueue, unsure_trials
from tune_cac.tuning.outcomes.run_lengths import CHOSEN, RunLengths
from tune_cac.tuning.search_plan import SearchPlan
from tune_cac.tuning.study_trials import (
    BestSetting,
    EndedTrials,
    OptionBaselines,
    PredefinedTrial,
    StudyTrials,
    as_key,
    live_trial,
    open_study,
    queued_parameters,
    tell_complete,
)
from tune_cac.tuning.trained_settings import TrainedSettings
from tune_cac.tuning.trial_config import TrialFields, config_of_trial
from tune_cac.tuning.warm_start.baseline import WarmStart, asks_for_sensitivities, learn

# --- Trials that are begun again: their worker died, the search was interrupted, or the baseline failed ---------------

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


# --- Optuna's samplers by the names that the option ``--sampler`` takes -----------------------------------------------


def make_sampler(seed: int, name: str = "auto") -> BaseSampler:
    """Return a sampler; all of them can handle several objectives and constraints.

    Args:
        seed: of its draws.
        name: ``auto``, whose candidates are twice Optuna's number, as they are cheap beside a trial; another one is
            Optuna's with its defaults. A grid draws nothing, so its study has a random one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "auto":
            return TPESampler(multivariate=True, group=True, constant_liar=True, n_ei_candidates=48, seed=seed)
        kinds = {"tpe": TPESampler, "gp": GPSampler, "nsga2": NSGAIISampler}
        sampler: BaseSampler = kinds.get(name, RandomSampler)(seed=seed)
        return sampler


# --- Selection of settings to train: those that fit the model and change the baseline's training ----------------------

#: Most settings skipped in a row because they change nothing; the next one is trained anyway.
_MOST_SKIPPED = 50
#: Most settings drawn in a row that the study has: by the sampler, which may stay where it was best, and then at
#: random; then it is taken to have all. 500 draws miss the last one of a hundred with 0.7 %.
_MOST_REPEATED, _MOST_REPEATED_AT_RANDOM = 25, 500
#: Most combinations of values in a row that do not fit the model; then the search ends.
_MOST_IMPOSSIBLE = 200
#: Most settings at a study's start that are chosen by replay; at most a third of its trials.
_MOST_SPREAD = 10


@dataclass(kw_only=True)
class Candidates:
    """Draw settings and judge them before they are trained."""

    trials: StudyTrials
    """Trials of the study."""
    base: TrialConfig
    """Config of the baseline."""
    allowed_drop: float | str
    """Drop of the metric that is allowed (`trainables.quality`)."""
    sampler: optuna.samplers.BaseSampler
    """Sampler of the settings, without the study's own state."""
    fresh_sampler: Callable[[int], optuna.samplers.BaseSampler]
    """Function that returns a plain sampler for a draw, by its number: one that remembers no other study."""
    config_of: Callable[[optuna.Trial], Mapping[str, Any]]
    """Function that returns the full config of an Optuna trial; suggests its parameters."""
    changes_nothing: Callable[[TrialConfig], bool]
    """Function that returns whether a config is certain to train as the baseline did."""
    _model_facts: dict[tuple[str, ...], ModelFacts] = field(default_factory=dict)
    """Facts on the model, by the workload's options."""
    _skips: int = _MOST_SKIPPED
    """Most settings to skip for the next trial."""
    _impossible: list[str] = field(default_factory=list)
    """Reasons for which settings so far could not be."""
    skipped: list[FrozenTrial] = field(default_factory=list)
    """Settings that were drawn and not trained, with the baseline's result, which the sampler is to avoid."""
    ended: bool = False
    """True once no setting is left: none was found that the study lacks, and none runs that may fail."""
    _none_found: bool = False
    """True if the last draws found none; they are repeated when a trial has begun or ended."""

    def __post_init__(self) -> None:
        self._trained = TrainedSettings(self.trials)

    @cached_property
    def _random(self) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=self.base.seed)

    def why_ended(self) -> str:
        """Return in one line why the search ended before its trials were used up."""
        return (
            f"ended after {plural(self.trials.finished_count(), 'trial')}: of "
            f"{_MOST_REPEATED + _MOST_REPEATED_AT_RANDOM} settings drawn in a row none was left to train"
        )

    def start_next(self, baseline: dict[str, Any], *, knows: bool) -> optuna.Trial | None:
        """Start a sampled setting that the study lacks and that changes the baseline's training; None if none is found.

        Then `ended` says whether that is final.

        It is drawn in a copy of the study in which skipped settings have the baseline's result, so that the sampler
        avoids them. The study itself holds only trials that are trained. Where none is found that acts, fewer are
        skipped for the next one, and the last one is trained.

        Args:
            baseline: its result row.
            knows: whether its run can prove of a setting that it changes nothing, without which none is skipped.
        """
        if not self._trained.follow() and self._none_found:
            return None
        draft = draft_of(self.trials, self.sampler, self.skipped)
        for last in range(self._skips, -1, -1):
            found = self._draw_new(draft)
            if found is None:
                self._none_found, self.ended = True, not self.trials.settings_are_trained()
                return None
            drawn, config = found
            acts = not knows or not self.changes_nothing(TrialConfig.from_mapping(config))
            if acts or last == 0:
                break
            tell_complete(draft, drawn, baseline, baseline, self.allowed_drop, self.base.quality)
            self.skipped.append(draft.get_trials(deepcopy=False)[drawn.number])
        self._skips, self._none_found = _MOST_SKIPPED if acts else max(1, self._skips // 2), False
        return self.trials.start({}, params=drawn.params, distributions=drawn.distributions)

    def _draw_new(self, draft: optuna.Study) -> tuple[optuna.Trial, Mapping[str, Any]] | None:
        """Return a draw that the study does not have, with its configuration; None if many in a row were known."""
        sampler = draft.sampler
        try:
            for repeated in range(_MOST_REPEATED + _MOST_REPEATED_AT_RANDOM):
                if repeated == _MOST_REPEATED:
                    draft.sampler = self._random
                drawn = draft.ask()
                config = self.config_of(drawn)
                if not self._trained.have(config):
                    return drawn, config
                draft.tell(drawn, state=TrialState.FAIL)  # no sampler learns from it
        finally:
            draft.sampler = sampler
        return None

    def start_plain(self) -> optuna.Trial:
        """Start a setting that a plain sampler draws.

        It draws in a copy of the study without the trials that have no parameters, baseline and controls: Optuna's GP
        and NSGA-II model the parameters that all trials have, and would draw at random beside a trial without any.
        """
        draft = draft_of(self.trials, self.fresh_sampler(len(self.trials.all())), with_parameters=True)
        self.config_of(draft.ask())
        frozen = draft.get_trials(deepcopy=False)[-1]
        return self.trials.start(
            {}, params=frozen.params, distributions=frozen.distributions, system_attrs=frozen.system_attrs
        )

    def first_possible(
        self, ask: Callable[[], optuna.Trial | str | None], why_useless: Callable[[optuna.Trial], str]
    ) -> tuple[optuna.Trial | str | None, str]:
        """Return the next trial whose schedule fits the model; report others to Optuna as pruned.

        Args:
            ask: returns the next trial, or what stands for none.
            why_useless: returns why a trial could not be judged; else an empty text.

        Returns:
            The trial, and an empty text; or None and why none of many can be.
        """
        for _ in range(_MOST_IMPOSSIBLE):
            if not isinstance(trial := ask(), optuna.Trial):
                only_baseline = trial is None and self.ended and self.trials.finished_count() <= 1
                return trial, self._why_none_can_be() if only_baseline and self._impossible else ""
            reason = self.why_impossible(trial) or why_useless(trial)
            if not reason:
                return trial, ""
            self._impossible.append(reason)
            self._trained.leave_out(self.config_of(trial))
            trial.set_user_attr("error", reason)
            self.trials.study.tell(trial, state=TrialState.PRUNED)
        return None, self._why_none_can_be()

    def _why_none_can_be(self) -> str:
        tried = plural(len(self._impossible), "combination")
        return f"of {tried} of the marked values none can be, such as: {self._impossible[-1]}"

    def why_impossible(self, trial: optuna.Trial) -> str:
        """Return what is wrong with a trial's compression schedule; empty for one that fits the model."""
        config = TrialConfig.from_mapping(self.config_of(trial))
        if not config.compresses:
            return ""
        compatible = bool(config.schedule_compatible)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the trial itself will warn
                read = read_schedule(schedule_of(config), compatible=compatible)
                if config.options not in self._model_facts:
                    same = replace(self.base, workload_options=config.options)
                    self._model_facts[config.options] = facts_of_run(same)
                resolve(read, self._model_facts[config.options], compatible=compatible)
        except UserError as error:
            return str(error)
        return ""


def queue_further(study: optuna.Study, starts: Sequence[Mapping[str, Any]], planned: int) -> None:
    """Queue a space's further starts, as many as there is room for after the baseline and the starting point."""
    for parameters in starts[: max(0, planned - 2)]:
        study.enqueue_trial(dict(parameters), user_attrs={"role": "search"})


def queue_spread(trials: StudyTrials, warm_start: WarmStart, planned: int, seed: int) -> list[dict[str, Any]]:
    """Queue settings with different predicted outcomes to begin a study, and return them.

    Args:
        trials: of the study; settings that an interrupted search queued are not queued again.
        warm_start: what was learned from the baseline's run.
        planned: trials of the study.
        seed: of the draw.
    """
    queued = {t.user_attrs.get("start") for t in trials.all()}
    starts = warm_start.spread(max(1, min(_MOST_SPREAD, planned // 3)), seed)
    for number, parameters in enumerate(starts):
        if number not in queued:
            trials.study.enqueue_trial(parameters, user_attrs={"role": "search", "start": number})
    return starts


# --- The search algorithm that Ray asks for trials --------------------------------------------------------------------

#: Ray's value for a search that suggests no more.
FINISHED: str = Searcher.FINISHED
#: Attribute of a study: the starting point waits for the baseline.
_WAITS = "start_waits"


class StudySearch(JournalSearcher):
    """Suggest trials to Ray, and report to Optuna two objectives, the metric and compute saved, and a constraint.

    A new study begins with the baseline (no parameters) and the space's starting point. A drop of the metric above the
    allowed one makes a trial infeasible. Rows of trials that end before the baseline enter the journal at once and are
    reported after it. A trial that failed, or whose values are not finite, is reported as FAIL with its error.
    """

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        """What is searched, on which run, within which limits."""
        base, tree, allowed_drop = plan.base, plan.tree, plan.allowed_drop
        self.saving, self.quality = base.saving, base.quality
        """The compute that trials are ranked by (None: that of training), and the metric by which they are compared."""
        self._search_space, self._context = plan.space, plan.context  # until the baseline's run is known
        self._fields = TrialFields(
            tree=tree, budget_bytes=plan.budget_bytes, trials=plan.trials if plan.sharing else 1,
            watch=plan.hold.get("CAC_WATCH"), checkpoint_every_s=plan.checkpoint_every_s,
            trial_timeout_s=plan.trial_timeout_s, worker_resources=plan.worker_resources,
        )  # fmt: skip
        self._warm_start: WarmStart | None = None
        self._claims_name: str | None = None
        self._to_ask: int | None = None
        self._rows_so_far: dict[str, dict[str, Any]] = {}
        self._nothing_can_be, self._start_seed, self._with_controls = "", plan.seed, False
        self._running: dict[str, optuna.Trial] = {}  # those that have not ended, by Ray's id
        super().__init__(metric=list(OBJECTIVES), mode=["max", "max"])  # Optuna's are the study's own
        self.study = open_study(plan.journal, make_sampler(plan.seed, plan.sampler), base.quality)
        """The Optuna study."""
        self.trials = StudyTrials(self.study, base.quality)
        """Queries on the study's trials."""
        self._place = parent(tree)
        self.restarts = Restarts(self.trials, plan.journal.parent, self._place, plan.retries)
        """Trials that are begun again."""
        self.candidates = Candidates(
            trials=self.trials, base=base, allowed_drop=allowed_drop, sampler=make_sampler(plan.seed),
            fresh_sampler=lambda number: make_sampler(wrapped_seed(plan.seed + number), plan.sampler),
            config_of=self._config, changes_nothing=lambda config: self.learn().does_nothing(config),
        )  # fmt: skip
        """Draws settings and checks them before training."""
        is_published = plan.space.start_is_published and not plan.hold  # held: not as published
        self._start_role = "published" if is_published else "search"
        self._grid = None if plan.grid is None else GridWalk(self.trials, plan.grid, self._start_role)
        self.outcomes: OutcomeQueue | None = None
        """Chooses settings in place of a sampler."""
        # Those that the study has are known where no further ones are searched, too.
        self._cut_runs = RunLengths(self.trials, base, plan.lengths or "1.0", allowed_drop, self._learned)
        self.lengths: RunLengths | None = None
        """Chooses the lengths of cut dense runs on which stops are searched, too."""
        if plan.learns and plan.repeats and plan.grid is None:
            self.outcomes = OutcomeQueue(
                self.trials, lambda: {base.epochs: self.learn()} if self.lengths is None else self._roots(), tree, base,
                allowed_drop, sure=plan.sure, sharing=plan.sharing, holds=plan.holds,
            )  # fmt: skip
            if plan.space.method == "gradskip" and not plan.space.options and base.saving is None:
                self.lengths = self._cut_runs if plan.lengths else None
        self._controls = StudyControls(base, tree)
        self._concurrency = MemoryConcurrency()
        self.baselines = OptionBaselines(self.trials, plan.space, base)
        """Baselines, of which there are several if the space varies options of the workload."""
        self._ended = EndedTrials(self.study, self.baselines, base.quality, allowed_drop)

    def begin(self) -> None:
        """Queue the baseline and the space's starting point; only for a study without trials.

        A starting point that depends on the sensitivities of the baseline's layers is queued when these are known.
        """
        self.study.enqueue_trial({}, user_attrs={"role": "baseline"})
        if self._grid is None and asks_for_sensitivities(self._search_space, self._context):
            self.study.set_user_attr(_WAITS, True)
        elif self._grid is None:  # whose first point is the starting point
            self._enqueue_start(self._context)

    def _enqueue_start(self, context: SpaceContext) -> None:
        self.study.enqueue_trial(dict(self._search_space.start(context)), user_attrs={"role": self._start_role})

    @contextmanager
    def coordinated(self) -> Iterator[None]:
        """Run the coordinator of the stage tree's leases, within a Ray session."""
        with leases_of(self.plan.tree) if self.plan.sharing else nullcontext() as self._claims_name:
            yield
        self._claims_name = None

    def ask_for(self, trials: int, *, controls: bool = False) -> None:
        """Set the number of trials to suggest, and whether missing controls follow; without it there is no end."""
        self._to_ask, self._with_controls = trials, controls

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's config, in the form of `trainables.trial.Trial`.

        None while others have to end first, such as the baseline; `FINISHED` when all planned trials were suggested.
        """
        if trial_id not in self._running and not self._concurrency.admits(trial_id, len(self._running)):
            return None
        trial = self._running.get(trial_id) or self._next()
        if trial is None or isinstance(trial, str):
            return trial
        self._running[trial_id] = trial
        attrs, config = trial.user_attrs, self._config(trial)
        shares = self.plan.sharing or attrs.get("role") in ("baseline", CUT)
        folder = f"{self.plan.run_folder}/{trial_folder_name(trial.number)}"
        trial.set_user_attr("config", config)
        if options := self.baselines.combination(config):
            trial.set_user_attr("options", options)
        trial.set_user_attr("folder", folder)
        return self._fields.of(
            trial, config, folder=folder, resume_from=self.restarts.own_checkpoint(attrs.get("resume_from")),
            shares=shares, claims=self._claims_name,
        )  # fmt: skip

    def _config(self, trial: optuna.Trial) -> dict[str, Any]:
        # The published defaults wait since before the baseline's run was known.
        space = self.plan.space if trial.user_attrs.get("role") == "published" else self._search_space
        return config_of_trial(trial, space, self.plan.base, self.plan.hold, self._context_of)

    def _context_of(self, epochs: int) -> SpaceContext:
        return (self.learn() if epochs == self.plan.base.epochs else self._cut_runs.learned()[epochs]).context

    def _next(self) -> optuna.Trial | str | None:
        if self.gave_up:
            return FINISHED
        if missing := self.baselines.missing():
            return self.restarts.start_predefined(missing[0])
        if self._to_ask == 0 or self.nothing_left:
            if self._with_controls:
                return self._next_control()
            if self.lengths is not None and (run := self.lengths.next()) is not None:
                return self.restarts.start_predefined(run)
            return None if self._running else FINISHED  # a worker may die, and its trial begins again
        trial, why_not = self.candidates.first_possible(
            self._ask, lambda one: self.baselines.why_useless(self._config(one))
        )
        if why_not:
            self._nothing_can_be = why_not
            return FINISHED
        if trial is None and self._with_controls:
            return self._next_control(shorter_alone=True)  # they depend on no other trial, so no processor idles
        if isinstance(trial, optuna.Trial) and self._to_ask is not None and trial.user_attrs.get("role") != CUT:
            self._to_ask -= 1
        return trial

    def _next_control(self, *, shorter_alone: bool = False) -> optuna.Trial | str | None:
        shorter_alone = shorter_alone or self.trials.settings_are_trained()
        if missing := self.missing_controls(shorter_alone=shorter_alone):
            return self.restarts.start_predefined(missing[0])
        return None if shorter_alone or self._running else FINISHED

    def missing_controls(self, *, shorter_alone: bool = False) -> list[PredefinedTrial]:
        """Return the controls that this study lacks: cut dense runs, and random stops of the best's compute.

        Args:
            shorter_alone: leave the random stops out, because the best setting is not known yet.
        """
        wanted = self._controls.shorter(self.lengths)
        if not shorter_alone and self._search_space.method == "gradskip":
            wanted += self._controls.of_equal_compute(self.best(), self._roots, self._context.unit_ends, self.lengths)
        begun = self.trials.begun()
        return [control for control in wanted if control.key not in begun]

    @property
    def shares(self) -> bool:
        """Return whether trials share training."""
        return self.plan.sharing

    def about_left(self) -> tuple[int, int]:
        """Return about how many trials and controls are still to end, running ones too, once the baseline has ended."""
        beside = [trial.user_attrs.get("role") in ("control", CUT) for trial in self._running.values()]
        further = 0 if self.nothing_left else self._to_ask or 0
        known = self.trials.baseline_row() is not None  # else nothing may be learned from its run yet
        if further and known and self.outcomes is not None and self.outcomes.predicts:
            further = min(further, self.outcomes.about_left())
        controls = 0
        if self._with_controls and (planned := len(self._controls.planned_epochs(self.lengths))):
            # Random stops save what the answer does, and early on there may still be one.
            answers = self.trials.finished_count() < 3 or self.best() is not None
            planned += RANDOM_RUNS if answers and self._search_space.method == "gradskip" else 0
            controls = max(0, planned - sum(t.user_attrs.get("role") in ("control", CUT) for t in self.trials.all()))
        return further + beside.count(False), controls + beside.count(True)

    def best(self) -> BestSetting | None:
        """Return the setting that is the answer so far; None if none saves anything."""
        return self.trials.best(self.plan.allowed_drop, unsure_trials(self))

    @property
    def gave_up(self) -> str:
        """Return why the search ended before all planned trials were suggested; empty otherwise."""
        return self.trials.baseline_error() if self.trials.baseline_failed() else self._nothing_can_be

    @property
    def nothing_left(self) -> bool:
        """Return whether every point of a grid, or setting, was begun, or no outcome is worth its training."""
        if self.candidates.ended or (self.outcomes is not None and self.outcomes.ended):
            return True
        return self._grid is not None and self.trials.baseline_row() is not None and self._grid.ended

    def _ask(self) -> optuna.Trial | str | None:
        """Return the next trial that can change training; None until the baseline ends."""
        baseline = self.trials.baseline_row()
        if baseline is None and not self.trials.baseline_runs():
            return self.trials.start_baseline()
        if self.lengths is not None and (run := self.lengths.next()) is not None:
            return self.restarts.start_predefined(run)
        if baseline is None:
            return None
        if self._grid is not None:
            return self._grid.start_next() or FINISHED
        self._enqueue_spread()
        if self.trials.wait():
            return self.study.ask()
        if not self.plan.learns:
            return self.candidates.start_plain()
        if self.outcomes is not None and self.outcomes.predicts:
            return self.outcomes.start_next(baseline)
        return self.candidates.start_next(baseline, knows=self.plan.repeats and self.learn().knows_what_acts)

    def learn(self) -> WarmStart:
        """Return what the baseline's run shows about this space; nothing is known if it failed."""
        if self._warm_start is None:
            self._warm_start = self._acting(self._learned(self.plan.base.epochs, self.trials.root()))
            if self._grid is not None:  # its points were counted on the run as it was known before
                self._warm_start = replace(self._warm_start, context=self._context)
        return self._warm_start

    def _acting(self, known: WarmStart) -> WarmStart:
        """Return what is known, and search explicit stops where the space's thresholds stop nothing on this run."""
        found = known.with_explicit_stops(self._start_seed) if self.plan.learns and self._grid is None else None
        if found is None:
            return known
        if self.trials.why_little != found[1]:  # else an earlier session has said so
            self.trials.tell_why_little(found[1])
        self._search_space, self._start_role = found[0].space, "search"
        return found[0]

    def _learned(self, epochs: int, root: str | None) -> WarmStart:
        plan, context = self.plan, self._context
        if epochs != plan.base.epochs:
            context = replace(context, epochs=epochs, total_steps=context.total_steps // plan.base.epochs * epochs)
        return learn(
            self._search_space, context, plan.tree, base=replace(plan.base, epochs=epochs), hold=plan.hold,
            root=root, allowed_drop=plan.allowed_drop,
        )  # fmt: skip

    def _roots(self) -> dict[int, WarmStart]:
        """Return what the recorded dense runs show, by epochs, the full run first; it alone if it was not recorded."""
        full = self.learn()
        return {self.plan.base.epochs: full, **({} if full.trace is None else self._cut_runs.learned())}

    def _enqueue_spread(self) -> None:
        """Queue the first settings once the baseline's run is known, once per study, instead of random ones.

        These are the space's starting point, if it waited, and settings with different predicted outcomes.
        """
        if self.study.user_attrs.get("spread"):
            return
        if self.study.user_attrs.get(_WAITS):
            self._enqueue_start(self.learn().context)
            self.study.set_user_attr(_WAITS, False)
        queue_further(self.study, self._search_space.further_starts(self.learn().context), self.plan.trials)
        spreads = self.plan.learns and not (self.outcomes is not None and self.outcomes.predicts)
        starts = queue_spread(self.trials, self.learn(), self.plan.trials, self._start_seed) if spreads else []
        self.trials.tell_why_little(self.learn().why_little(self._start_seed, acts=bool(starts)))
        self.study.set_user_attr("spread", True)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Store what a trial has executed, in case it fails."""
        self._rows_so_far[trial_id] = {name: result[name] for name in SPENT if name in result}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report to Optuna how a trial ended. `tell_failure`, which knows the message, reports failures."""
        if error or trial_id not in self._running:
            return
        trial = self._running.pop(trial_id)
        self._rows_so_far.pop(trial_id, None)
        row = {name: result[name] for name in ROW_KEYS if name in result} if result else {}
        if trial.user_attrs.get("role") in ("baseline", CUT) and row.get("stage"):
            trial.set_user_attr("root", row["stage"])  # a run without interventions ends in its root
        if not self.plan.sharing and row:
            row["stage"] = ""  # only the baseline was recorded, so there is no tree
        with self.telling():
            self._ended.tell(trial, row)

    def tell_failure(self, trial_id: str, message: str, *, died: bool = False, out_of_memory: bool = False) -> bool:
        """Report a failed trial to Optuna; return whether it is begun again, as another trial of the same parameters.

        Args:
            trial_id: Ray's.
            message: what it raised, or how its worker ended.
            died: whether its worker died, so that the trial may continue from its last checkpoint.
            out_of_memory: whether its node's memory was used up, so that it may fit with fewer trials at a time.
        """
        if trial_id not in self._running:
            return False
        fits_later = out_of_memory and self._concurrency.lower(trial_id, len(self._running))
        trial = self._running.pop(trial_id)
        trial.set_user_attr("row_so_far", self._rows_so_far.pop(trial_id, {}))
        release_all(self._claims_name, trial.user_attrs.get("folder"))
        again = self.restarts.restart(trial, message, died=died, fits_later=fits_later)
        if again and "given" not in trial.user_attrs and self._to_ask is not None:
            self._to_ask += 1
        self._ended.tell_failure(trial, message)
        return again

    def adopt_unfinished(self) -> None:
        """Report the trials of an interrupted search; call before suggesting.

        Those that were running are reported as FAIL and begun again, from their last checkpoint if there is one.
        """
        self._ended.adopt(self.restarts.adopt_unfinished())
