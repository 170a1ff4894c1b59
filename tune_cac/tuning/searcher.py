"""The search algorithm that Ray asks for trials: baseline, settings and controls of one Optuna study."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FixedTrial, TrialState
from ray.tune.search import Searcher

from analysis.formatting import plural
from analysis.metrics.over_seeds import OPEN, WITHIN
from analysis.metrics.ranking import CUT
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.metrics import OBJECTIVES, ROW_KEYS
from trainables.stage_tree.coordinator import RayLeases, start_coordinator
from trainables.storage import is_uri, joined, parent
from trainables.workload_options import CACHE_VARIABLE
from tune_cac.messages import say
from tune_cac.ray_backend.worker_leases import CoordinatorLeases
from tune_cac.study.folder import SPENT, trial_folder_name
from tune_cac.tuning.baseline import WarmStart, learn
from tune_cac.tuning.candidates import Candidates, GridWalk, SpaceWalk, make_sampler
from tune_cac.tuning.controls import RunLengths, cut_with_norms_of, shorter_trainings
from tune_cac.tuning.outcomes import OutcomeQueue
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.race import MOST_SETTINGS, Race
from tune_cac.tuning.restarts import Restarts
from tune_cac.tuning.run_context import run_context
from tune_cac.tuning.trials import EPOCHS, BestSetting, PredefinedTrial, StudyTrials, open_study

#: Ray's value for a search that suggests no more.
FINISHED: str = Searcher.FINISHED


def config_of_trial(
    trial: optuna.Trial | FixedTrial, space: Space, base: TrialConfig, hold: Mapping[str, Any],
    context_of: Callable[[int], SpaceContext],
) -> dict[str, Any]:  # fmt: skip
    """Return all fields of a trial's configuration; suggests its parameters.

    ``hold`` is fixed in every trial but the baseline; ``context_of`` returns the facts on a run of so many epochs.
    """
    if "given" in trial.user_attrs:
        values: dict[str, Any] = dict(trial.user_attrs["given"])
    elif trial.user_attrs.get("role") == "baseline":
        values = {"method": "none"}
    else:
        epochs = trial.user_attrs.get(EPOCHS, base.epochs)
        context = context_of(epochs)
        with warnings.catch_warnings():  # the published defaults may lie outside the ranges of this run
            warnings.filterwarnings("ignore", message="(Fixed|The value .*) parameter .* is out of (the )?range")
            suggested = space.suggest(trial, context)
        # In types that JSON preserves, so that Ray, the journal and a resumed search see the same config.
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in suggested.items()}
        values = {"method": space.method, **plain, **hold}
        if epochs != base.epochs:
            values[EPOCHS] = trial.suggest_int(EPOCHS, 1, base.epochs)
    return {**base.to_dict(), **values}


def _cut(context: SpaceContext, full: int, epochs: int) -> SpaceContext:
    """Return the facts on a run of some of the full number of epochs."""
    return replace(context, epochs=epochs, total_steps=context.total_steps // full * epochs)


class StudySearch(Searcher):
    """Suggest trials to Ray, and report to Optuna how they ended (`StudyTrials`).

    A new study begins with the baseline (no parameters) and the space's starting point.

    The journal is the only state: Ray's own snapshots, which would lag behind it, hold nothing.
    """

    judges = True  # True if trials are judged against a baseline

    def __init__(self, plan: SearchPlan) -> None:
        super().__init__(metric=list(OBJECTIVES), mode=["max", "max"])  # Optuna's are the study's own
        base = plan.base
        self.plan = plan
        self.unwritten: OSError | None = None  # of the journal; Ray takes it for the failure of a trial
        self.study = open_study(plan.journal, make_sampler(plan.seed, plan.sampler), base.quality)  # the Optuna study
        self.trials = StudyTrials(self.study, plan, judges=self.judges)
        self._place = parent(plan.tree)
        self.restarts = Restarts(self.trials, plan)
        self.candidates = Candidates(self.trials, plan, self._config)
        self._search_space, self._context = plan.space, plan.context  # until the baseline's run is known
        is_published = plan.space.start_is_published and not plan.hold  # held: not as published
        self._start_role = "published" if is_published else "search"
        self._grid = None if plan.grid is None else GridWalk(self.trials, plan.grid, self._start_role)
        self.walk: SpaceWalk | None = None  # decides settings in place of a sampler
        if plan.space.next_point is not None and plan.learns and plan.grid is None:
            self._walk_through(plan.space)
        chooses = plan.learns and plan.repeats and plan.grid is None and self.walk is None
        cuts = chooses and plan.lengths and plan.space.method == "gradskip" and not plan.space.options
        # Of cut dense runs those that the study has are known in any case.
        self.lengths = RunLengths(
            self.trials, plan, self._learned, self._beyond_over_seeds, searched=bool(cuts and base.saving is None)
        )
        self.race = Race(self.trials, plan, lambda: self.trials.settings(saving=base.saving), self._may_answer)
        self.outcomes: OutcomeQueue | None = None  # chooses settings in place of a sampler
        if chooses:
            self.outcomes = OutcomeQueue(
                self.trials,
                plan,
                lambda: self._roots() if self.lengths.searched else {base.epochs: self.learn()},
                self.race.beyond,
            )
        self._beyond = 0  # settings that lost too much over further seeds when settings were last looked for
        self._most: int | None = None  # trials at a time, since memory ran out
        self._begun_beside: set[str] = set()  # trials that had more beside them, which may fit with fewer
        self._warm_start: WarmStart | None = None
        self._watch = plan.hold.get("CAC_WATCH")  # signals of all trials are the same
        self._claims_name: str | None = None  # of the coordinator of the stage tree's leases
        self._to_ask: int | None = None
        self._nothing_at: tuple[int, int] | None = None  # `StudyTrials.counts` when no trial was worth it
        self._with_controls, self._with_seeds, self._nothing_can_be = False, False, ""
        self._running: dict[str, optuna.Trial] = {}  # those that have not ended, by Ray's id
        self._rows_so_far: dict[str, dict[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles the searcher for a restore that is not used

    def save(self, checkpoint_path: str) -> None:
        """Write nothing: `search --resume` reads the journal."""
        Path(checkpoint_path).touch()

    @contextmanager
    def coordinated(self) -> Iterator[None]:
        """Run the coordinator of the stage tree's leases, within a Ray session."""
        actor = None
        if self.plan.sharing:
            self._claims_name = f"tune_cac-{hashlib.sha256(str(self.plan.tree).encode()).hexdigest()[:12]}"
            actor = start_coordinator(self._claims_name, CoordinatorLeases)
        yield
        del actor  # it lives as long as this reference
        self._claims_name = None

    def _walk_through(self, space: Space) -> None:
        plan = replace(self.plan, space=space)
        self.walk = SpaceWalk(self.trials, plan, lambda: self.learn().context, lambda: self.race.beyond())

    # --- before trials are asked for ---

    def begin(self) -> None:
        """Queue the baseline and the space's starting point; only for a study without trials."""
        self.study.enqueue_trial({}, user_attrs={"role": "baseline"})
        if self._grid is None:  # whose first point is the starting point
            self._enqueue_start(self._context)

    def _enqueue_start(self, context: SpaceContext) -> None:
        self.study.enqueue_trial(dict(self._search_space.start(context)), user_attrs={"role": self._start_role})

    def adopt_unfinished(self) -> None:
        """Report the trials of an interrupted search; call before suggesting."""
        self.trials.report_ended(self.restarts.adopt_unfinished())

    def ask_for(self, trials: int, *, controls: bool = False, seeds: bool = False) -> None:
        """Set the number of trials to suggest, and whether further seeds and missing controls follow.

        Until then there is no end.
        """
        self._to_ask, self._with_controls, self._with_seeds = trials, controls, seeds
        self.race.controls = controls

    # --- the next trial ---

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's config, in the form of `trainables.trial.Trial`.

        None while others have to end first, such as the baseline; `FINISHED` when all planned trials were suggested.
        """
        if self._most is not None and trial_id not in self._running and len(self._running) >= self._most:
            return None
        trial = self._running.get(trial_id) or self._next()
        if trial is None or isinstance(trial, str):
            return trial
        self._running[trial_id] = trial
        return self._sent(trial)

    def _sent(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return what Ray sends a trial, which is noted in the journal."""
        plan, attrs, config = self.plan, trial.user_attrs, self._config(trial)
        role, options = attrs.get("role", "search"), self.trials.combination(config)
        folder = f"{plan.run_folder}/{trial_folder_name(trial.number)}"
        trial.set_user_attr("config", config)
        if options:
            trial.set_user_attr("options", options)
        trial.set_user_attr("folder", folder)
        sharing = {
            "tree": str(plan.tree), "budget_bytes": plan.budget_bytes, "trials": self._may_fork(config["seed"]),
            "watches": [] if self._watch is None else [list(self._watch)],
            "checkpoint_every_s": plan.checkpoint_every_s, "claims": self._claims_name, "holder": folder,
        }  # fmt: skip
        return {
            "config": config,
            "trial": trial.number,
            "folder": str(joined(self._place, folder)),
            "cache": None if is_uri(self._place) else os.environ.get(CACHE_VARIABLE),  # of this machine's disk
            "role": role,
            "options": options,
            "resume_from": self.restarts.own_checkpoint(attrs.get("resume_from")),
            "checkpoint_every_s": plan.checkpoint_every_s,
            "trial_timeout_s": plan.trial_timeout_s,
            "worker_resources": None if plan.worker_resources is None else dict(plan.worker_resources),
            "sharing": sharing if plan.sharing or role in ("baseline", CUT) else None,
        }

    def _may_fork(self, seed: int) -> int:
        """Return how many trials may go on from the middle of a run on a seed."""
        plan = self.plan
        if not plan.sharing or self._search_space.uses_forward_cache:  # which begin by what they freeze
            return 1
        return plan.trials if seed == plan.base.seed else min(plan.trials, MOST_SETTINGS)

    def _config(self, trial: optuna.Trial | FixedTrial) -> dict[str, Any]:
        # The published defaults wait since before the baseline's run was known.
        space = self.plan.space if trial.user_attrs.get("role") == "published" else self._search_space
        return config_of_trial(trial, space, self.plan.base, self.plan.hold, self._context_of)

    def _context_of(self, epochs: int) -> SpaceContext:
        if self.walk is not None and epochs != (full := self.plan.base.epochs):  # no dense run of that length is needed
            return _cut(self.learn().context, full, epochs)
        return (self.learn() if epochs == self.plan.base.epochs else self.lengths.learned()[epochs]).context

    def _next(self) -> optuna.Trial | str | None:
        if self.gave_up:
            return FINISHED
        if missing := self.trials.missing_baselines():
            return self.restarts.start_predefined(missing[0])
        if self._is_over() and self._with_seeds and (run := self._next_seed()) is not None:
            return self.restarts.start_predefined(run)
        if self._is_over():
            if self._with_controls:
                return self._next_control()
            if (run := self.lengths.next()) is not None:
                return self.restarts.start_predefined(run)
            return None if self._running else FINISHED  # a worker may die, and its trial begins again
        trial, why_not = self.candidates.first_possible(self._ask)
        if why_not:
            self._nothing_can_be = why_not
            return FINISHED
        if trial is None and self._with_controls:
            trial = self._next_control(shorter_alone=True)  # they depend on no other trial, so no processor idles
        if trial is None and self._with_seeds and self.race.leader()[0] is not None:
            run = self.race.next_baseline()
            trial = None if run is None else self.restarts.start_predefined(run)
        counts = isinstance(trial, optuna.Trial) and trial.user_attrs.get("role") not in (CUT, "control")
        if counts and self._to_ask is not None:
            self._to_ask -= 1
        return trial

    def _is_over(self) -> bool:
        """Return whether no further setting is to be suggested."""
        return self._to_ask == 0 or self.nothing_left

    def _next_seed(self) -> PredefinedTrial | None:
        """Return the next run on a further seed; settings are looked for anew first where one has lost too much."""
        if self.trials.settings_are_trained():
            return self.race.next_baseline() if self.race.leader()[0] is not None else None
        if (beyond := len(self.race.beyond())) > self._beyond:
            self._beyond, self._nothing_at = beyond, None
            for chooser in (self.outcomes, self.walk):
                if chooser is not None:
                    chooser.ended = False
            if not self._is_over():
                return None
        return self.race.next()

    def _ask(self) -> optuna.Trial | str | None:
        """Return the next trial that can change training; None until the baseline ends."""
        baseline = self.trials.baseline_row()
        if baseline is not None:
            self.learn()  # first of all, for it may search another space
            if self.gave_up:
                return FINISHED
        if baseline is None and not any(t.state == TrialState.RUNNING for t in self.trials.baselines()):
            return self.trials.start_baseline()
        if (run := self.lengths.next()) is not None:
            return self.restarts.start_predefined(run)
        if baseline is None:
            return None
        if self._grid is not None:
            return self._grid.start_next() or FINISHED
        self._enqueue_first()
        if self.trials.all(TrialState.WAITING):
            return self.study.ask()
        if not self.plan.learns:
            return self.candidates.start_plain()
        if (now := self.trials.counts()) == self._nothing_at:  # asked again while others run
            return None
        if self.walk is not None:
            trial = self.walk.start_next(baseline)
        elif self.outcomes is not None and self.outcomes.predicts:
            trial = self.outcomes.start_next(baseline)
        else:
            trial = self.candidates.start_next()
        self._nothing_at = now if trial is None else None
        return trial

    def _enqueue_first(self) -> None:
        """Queue the space's starts that need the baseline's run, and say what it shows, once per study."""
        if self.study.user_attrs.get("spread"):
            return
        further = self._search_space.further_starts(self.learn().context)
        for parameters in further[: max(0, self.plan.trials - 2)]:  # beside the baseline and the starting point
            self.study.enqueue_trial(dict(parameters), user_attrs={"role": "search"})
        self.trials.tell_why_little(self.learn().why_little(self.plan.seed))
        self.study.set_user_attr("spread", True)

    def _next_control(self, *, shorter_alone: bool = False) -> optuna.Trial | str | None:
        undecided = self._with_seeds and self._running and self.race.leader()[1] == OPEN  # by one that runs
        shorter_alone = shorter_alone or undecided or self.trials.settings_are_trained()
        if missing := self.missing_controls(shorter_alone=shorter_alone):
            return self.restarts.start_predefined(missing[0])
        return None if shorter_alone or self._running else FINISHED

    def missing_controls(self, *, shorter_alone: bool = False) -> list[PredefinedTrial]:
        """Return the controls that this study lacks: cut dense runs, the last of the best's compute and on its seeds.

        With ``shorter_alone`` the latter are left out, as long as the best setting is not known. Of a space that
        decides itself: a dense run of the best's norms, cut to its compute.
        """
        self._learn_if_possible()
        if self.walk is not None:
            best = None if shorter_alone else self.best()
            found = cut_with_norms_of(self.plan.base, best) if best and shorter_trainings(self.plan.base) else []
            found += [] if best is None else self.race.beside(best)
            return [run for run in found if run.key not in self.trials.begun()]
        wanted: list[PredefinedTrial | None] = [self.lengths.next()]
        if not self.lengths.searched:
            wanted += shorter_trainings(self.plan.base)
        if not shorter_alone and (best := self.best()) is not None and shorter_trainings(self.plan.base):
            wanted += [self.lengths.beside(best), *self.race.beside(best)]
        begun = self.trials.begun()
        return [run for run in wanted if run is not None and run.key not in begun]

    # --- what is known ---

    @property
    def gave_up(self) -> str:
        """Return why the search ended before all planned trials were suggested; empty otherwise."""
        return "the baseline failed" if self.trials.baseline_failed() else self._nothing_can_be

    @property
    def nothing_left(self) -> bool:
        """Return whether every point of a grid, or setting, was begun, or no other is worth its training."""
        if any(one is not None and one.ended for one in (self.candidates, self.outcomes, self.walk)):
            return True
        if self.race.is_spent and (self.walk is not None or self.outcomes is not None):
            return True  # what they chose now would only be what follows a refused setting
        return self._grid is not None and self.trials.baseline_row() is not None and self._grid.ended

    def best(self, saving: str | None = None) -> BestSetting | None:
        """Return the setting that is the answer so far, ranked by some saving; None if none saves anything."""
        leader, decided = self.race.leader()
        if decided == WITHIN:
            return leader
        beyond, settings = self.race.beyond(), self.trials.settings(saving=saving)
        return next((one for one in settings if one.trial not in beyond and self._may_answer(one)), None)

    def _may_answer(self, one: BestSetting) -> bool:
        """Return whether a setting is tried over seeds by its expected loss; else whether it is within on its own seed.

        Only a model of the quality tells what to expect.
        """
        if self.outcomes is None or self.plan.seeds == 1 or self.gave_up or not self.outcomes.predicts:
            return one.is_within
        return one.trial not in self.outcomes.beyond()

    def _beyond_over_seeds(self) -> list[int]:
        """Return the trials that were refused over further seeds, and then those of which that is expected.

        None once no other setting is begun.
        """
        refused = [] if self.race.is_spent else self.race.beyond()
        return [*refused, *self.outcomes.beyond()] if refused and self.outcomes is not None else refused

    def _learn_if_possible(self) -> None:
        """Learn which space is searched, once the baseline has ended."""
        if not self.gave_up and self.trials.baseline_row() is not None:
            self.learn()

    def learn(self) -> WarmStart:
        """Return what the baseline's run shows about this space; nothing is known if it failed."""
        if self._warm_start is None:
            self._warm_start = self._acting(self._learned(self.plan.base.epochs, self.trials.root()))
            if self._grid is not None:  # its points were counted on the run as it was known before
                self._warm_start = replace(self._warm_start, context=self._context)
        return self._warm_start

    def _acting(self, known: WarmStart) -> WarmStart:
        """Return what is known, and search explicit stops where the space's thresholds stop nothing on this run."""
        may = self.plan.learns and self.judges and self._grid is None
        found = known.with_explicit_stops(self.plan.seed) if may else None
        if found is None:
            return known
        if self.trials.why_little != found[1]:  # else an earlier session has said so
            self.trials.tell_why_little(found[1])
        self._search_space, self._start_role = found[0].space, "search"
        if found[0].space.next_point is None:
            return found[0]
        self.outcomes, self.lengths.searched = None, False
        self._walk_through(found[0].space)
        fixed = {name: value for name, value in self.plan.hold.items() if name in found[0].space.may_be_fixed}
        return replace(found[0], context=self._with_prefixes(replace(found[0].context, fixed=fixed)))

    def _with_prefixes(self, context: SpaceContext) -> SpaceContext:
        """Return facts on the run with those that a search of frozen prefixes wants, too."""
        run = run_context(self.plan.base, caches=self.plan.worker_resources is None)
        return replace(context, kept_ends=run.kept_ends, forward_cache_mb=run.forward_cache_mb)

    def _learned(self, epochs: int, root: str | None) -> WarmStart:
        base, context = self.plan.base, self._context
        if epochs != base.epochs:
            base, context = replace(base, epochs=epochs), _cut(context, base.epochs, epochs)
        return learn(replace(self.plan, space=self._search_space, context=context, base=base), root)

    def _roots(self) -> dict[int, WarmStart]:
        """Return what the recorded dense runs show, by epochs, the full run first; it alone if it was not recorded."""
        full = self.learn()
        return {self.plan.base.epochs: full, **({} if full.trace is None else self.lengths.learned())}

    # --- how trials end ---

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Store what a trial has executed, in case it fails."""
        self._rows_so_far[trial_id] = {name: result[name] for name in SPENT if name in result}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report to Optuna a trial that ended well; `tell_failure`, which knows the message, reports the others."""
        if error or trial_id not in self._running:
            return
        trial = self._running.pop(trial_id)
        self._rows_so_far.pop(trial_id, None)
        row = {name: result[name] for name in ROW_KEYS if name in result} if result else {}
        if trial.user_attrs.get("role") in ("baseline", CUT) and row.get("stage"):
            trial.set_user_attr("root", row["stage"])  # a run without interventions ends in its root
        if not self.plan.sharing and row:
            row["stage"] = ""  # only the baseline was recorded, so there is no tree
        try:
            self.trials.report(trial, row)
        except OSError as unwritten:
            self.unwritten = unwritten
            raise

    def tell_failure(self, trial_id: str, message: str, *, died: bool = False, out_of_memory: bool = False) -> bool:
        """Report a failed trial to Optuna; return whether it is begun again, as another trial of the same parameters.

        A trial whose worker died may go on from its last checkpoint. If memory ran out, half as many trials run at a
        time for the rest of the search, so that this one may fit.
        """
        if trial_id not in self._running:
            return False
        at_a_time = len(self._running)
        if out_of_memory and at_a_time > 1:
            self._most = at_a_time // 2
            self._begun_beside |= self._running.keys()
            say(f"memory ran out with {at_a_time} trials at a time: from here on at most {plural(self._most, 'trial')}")
        died = died or (out_of_memory and trial_id in self._begun_beside)
        trial = self._running.pop(trial_id)
        trial.set_user_attr("row_so_far", self._rows_so_far.pop(trial_id, {}))
        if self._claims_name is not None and (folder := trial.user_attrs.get("folder")) is not None:
            RayLeases(self._claims_name).release_all(folder)  # no other trial is to wait for this one
        again = died and self.restarts.restart(trial)
        if again and "given" not in trial.user_attrs and self._to_ask is not None:
            self._to_ask += 1
        self.trials.report_failure(trial, message)
        return again
