"""Settings to train where no outcomes are predicted: drawn by a sampler, or the points of a grid."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from analysis.formatting import ROUNDING, plural
from search_spaces import SpaceContext
from search_spaces.grid import GridPoints
from search_spaces.space import Tried
from trainables.compression.schedule import ModelFacts, read_schedule, resolve
from trainables.compression.scheduler import facts_of_run
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig, wrapped_seed
from trainables.errors import UserError
from trainables.quality import allowed_amount
from tune_cac.study.search_options import AUTO_LENGTHS, read_lengths
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.trials import (
    EPOCHS,
    OF_EPOCHS,
    StudyTrials,
    as_key,
    queued_parameters,
    saved_of_row,
)

#: Most settings drawn in a row that the study has: by the sampler, which may stay where it was best, and then at
#: random; then it is taken to have all. 500 draws miss the last one of a hundred with 0.7 %.
_MOST_REPEATED, _MOST_REPEATED_AT_RANDOM = 25, 500
#: Most combinations of values in a row that do not fit the model; then the search ends.
_MOST_IMPOSSIBLE = 200


def make_sampler(seed: int, name: str = "auto") -> BaseSampler:
    """Return a sampler that can handle several objectives and constraints; Optuna's with its defaults but for auto."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "auto":
            return TPESampler(multivariate=True, group=True, constant_liar=True, n_ei_candidates=48, seed=seed)
        kinds = {"tpe": TPESampler, "gp": GPSampler, "nsga2": NSGAIISampler}
        sampler: BaseSampler = kinds.get(name, RandomSampler)(seed=seed)
        return sampler


def draft_of(trials: StudyTrials, sampler: BaseSampler, *, with_parameters: bool = False) -> optuna.Study:
    """Return a copy in memory of the trials that were begun, or of those with parameters, as samplers read them."""
    draft = optuna.create_study(directions=trials.study.directions, sampler=sampler)
    for trial in trials.all():
        begun = trial.state.is_finished() or (trial.state == TrialState.RUNNING and trial.params)
        if begun and (trial.params or not with_parameters):
            params = {name: _on_grid(value, trial.distributions[name]) for name, value in trial.params.items()}
            with suppress(ValueError):  # a starting point may lie outside the ranges; Optuna rejects it here
                copy = create_trial(
                    state=trial.state,
                    values=trial.values if trial.state == TrialState.COMPLETE else None,
                    params=params,
                    distributions=trial.distributions,
                    system_attrs=trial.system_attrs,
                )
                draft.add_trial(copy)
    return draft


def _on_grid(value: Any, asked: BaseDistribution) -> Any:
    """Return a value between two steps of a range on the nearer one."""
    if not isinstance(asked, (FloatDistribution, IntDistribution)) or not asked.step or asked.log:
        return value
    if not asked.low <= value <= asked.high:
        return value  # of a starting point, which Optuna rejects
    near = min(asked.low + round((value - asked.low) / asked.step) * asked.step, asked.high)
    return int(near) if isinstance(asked, IntDistribution) else float(near)


class Candidates:
    """Draw settings that the study lacks, and pass over those that do not fit the model.

    They are drawn in a copy of the study, which itself holds only trials that are trained. ``config_of`` suggests a
    trial's parameters and returns its full config.
    """

    why_ended = f"of {_MOST_REPEATED + _MOST_REPEATED_AT_RANDOM} settings drawn in a row none was left to train"

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, config_of: Callable[[optuna.Trial], Mapping[str, Any]]
    ) -> None:
        self._trials, self._plan, self._config_of = trials, plan, config_of
        self._sampler = make_sampler(plan.seed)  # remembers no study's state
        self._random = RandomSampler(seed=plan.base.seed)
        self.ended = False  # True once no setting is left: the study has all that are found, and none runs
        self._impossible: dict[str, str] = {}  # configurations that could not be, with the reason
        # What failed in an earlier search may have been mended since.
        earlier = (t for t in trials.all() if t.state in (TrialState.FAIL, TrialState.PRUNED))
        self._failed_before = {trial.number for trial in earlier}
        self._model_facts: dict[tuple[str, ...], ModelFacts] = {}  # by the workload's options

    def start_next(self) -> optuna.Trial | None:
        """Start a sampled setting that the study lacks; None if none is found. Then `ended` says if that is final."""
        known = self._known()
        draft = draft_of(self._trials, self._sampler)
        for repeated in range(_MOST_REPEATED + _MOST_REPEATED_AT_RANDOM):
            if repeated == _MOST_REPEATED:
                draft.sampler = self._random
            drawn = draft.ask()
            if as_key(self._config_of(drawn)) not in known:
                return self._trials.start({}, params=drawn.params, distributions=drawn.distributions)
            draft.tell(drawn, state=TrialState.FAIL)  # no sampler learns from it
        self.ended = not self._trials.settings_are_trained()
        return None

    def _known(self) -> set[str]:
        """Return the configurations that need no training: trained, in training, failed in this search, impossible."""
        return self._impossible.keys() | {
            as_key(trial.user_attrs["config"])
            for trial in self._trials.all()
            if "config" in trial.user_attrs
            and trial.number not in self._failed_before
            and not (trial.state == TrialState.FAIL and "continued_by" in trial.user_attrs)
        }

    def start_plain(self) -> optuna.Trial:
        """Start a setting that a plain sampler draws.

        Beside a trial without parameters Optuna's GP and NSGA-II would draw at random, so the copy has none.
        """
        plan, number = self._plan, len(self._trials.all())
        sampler = make_sampler(wrapped_seed(plan.seed + number), plan.sampler)  # one that remembers no other study
        draft = draft_of(self._trials, sampler, with_parameters=True)
        self._config_of(draft.ask())
        drawn = draft.get_trials(deepcopy=False)[-1]
        return self._trials.start(
            {}, params=drawn.params, distributions=drawn.distributions, system_attrs=drawn.system_attrs
        )

    def first_possible(self, ask: Callable[[], optuna.Trial | str | None]) -> tuple[optuna.Trial | str | None, str]:
        """Return the next trial that fits the model and can be judged; report others to Optuna as pruned.

        Returns:
            The trial, or what stands for none; and why none of many can be, else an empty text.
        """
        for _ in range(_MOST_IMPOSSIBLE):
            if not isinstance(trial := ask(), optuna.Trial):
                only_baseline = trial is None and self.ended and self._trials.finished_count() <= 1
                return trial, self._why_none_can_be() if only_baseline and self._impossible else ""
            config = self._config_of(trial)
            reason = self._why_impossible(TrialConfig.from_mapping(config)) or self._trials.why_useless(config)
            if not reason:
                return trial, ""
            self._impossible[as_key(config)] = reason
            trial.set_user_attr("error", reason)
            self._trials.study.tell(trial, state=TrialState.PRUNED)
        return None, self._why_none_can_be()

    def _why_none_can_be(self) -> str:
        tried = plural(len(self._impossible), "combination")
        return f"of {tried} of the marked values none can be, such as: {[*self._impossible.values()][-1]}"

    def _why_impossible(self, config: TrialConfig) -> str:
        """Return what is wrong with a compression schedule; empty for one that fits the model."""
        if not config.compresses:
            return ""
        compatible = bool(config.schedule_compatible)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the trial itself will warn
                read = read_schedule(schedule_of(config), compatible=compatible)
                if config.options not in self._model_facts:
                    same = replace(self._plan.base, workload_options=config.options)
                    self._model_facts[config.options] = facts_of_run(same)
                resolve(read, self._model_facts[config.options], compatible=compatible)
        except UserError as error:
            return str(error)
        return ""


# --- Settings that the space decides one after the other, from how those before have ended ----------------------------


class SpaceWalk:
    """Start the settings that `Space.next_point` returns.

    ``beyond`` returns the trials whose settings lose too much over further seeds.
    """

    why_ended = "all that the space tries one after the other is done"

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, context: Callable[[], SpaceContext],
        beyond: Callable[[], Collection[int]],
    ) -> None:  # fmt: skip
        self._trials, self._plan, self._context, self._beyond = trials, plan, context, beyond
        self.ended = False  # True once nothing is left

    def start_next(self, baseline: Mapping[str, Any]) -> optuna.Trial | None:
        """Start the next setting; None if none is left, or one that runs decides it. Then `ended` says which."""
        tried, epochs = [*self._tried(baseline)], self._plan.base.epochs
        context = replace(self._context(), epochs=epochs)
        if self._plan.lengths != AUTO_LENGTHS:
            context = replace(context, lengths=tuple(s for s in read_lengths(self._plan.lengths or "1.0") if s < 1))
        assert self._plan.space.next_point is not None
        found = self._plan.space.next_point(context, tried)
        if found is None:
            self.ended = all(one.has_ended for one in tried)
            return None
        length = {} if found.epochs == epochs else {EPOCHS: found.epochs}
        attrs = {**length, OF_EPOCHS: epochs} if length else {}
        self._trials.study.enqueue_trial({**found.parameters, **length}, user_attrs={"role": "search", **attrs})
        return self._trials.study.ask()

    def _tried(self, baseline: Mapping[str, Any]) -> Iterator[Tried]:
        """Yield the settings that were begun."""
        full, quality, beyond = self._plan.base.epochs, self._plan.base.quality, self._beyond()
        allowed = allowed_amount(self._plan.allowed_drop, baseline["quality"])
        for trial in self._trials.all():
            attrs = trial.user_attrs
            if attrs.get("role") in ("baseline", "control") or "continued_by" in attrs:
                continue
            row = attrs.get("row")
            lost = math.inf if row is None else quality.lost(row["quality"], baseline["quality"])
            yield Tried(
                parameters={n: value for n, value in queued_parameters(trial).items() if n != EPOCHS},
                epochs=attrs.get(EPOCHS, attrs.get("given", {}).get(EPOCHS, full)),
                has_ended=row is not None or trial.state.is_finished(),
                saved=0.0 if row is None else saved_of_row(row, self._plan.base.saving, baseline),
                lost=lost,
                is_within=lost <= allowed + ROUNDING and trial.number not in beyond,
            )


# --- The trials of a grid search: its points in their order, each once, whatever interrupted the search ---------------


class GridWalk:
    """Start the points that the study lacks; ``start_role`` is that of the first, the space's starting point.

    Optuna's BruteForceSampler raises beside a trial without parameters, as the baseline is, and its order is random.
    """

    def __init__(self, trials: StudyTrials, points: GridPoints, start_role: str) -> None:
        self._trials, self._start_role = trials, start_role
        self._points = {as_key(point): point for point in points}

    def _missing(self) -> list[Mapping[str, Any]]:
        trials = [trial for trial in self._trials.all() if "continued_by" not in trial.user_attrs]
        points = [trial for trial in trials if trial.user_attrs.get("role") not in ("baseline", "control")]
        begun = {as_key(queued_parameters(trial)) for trial in points}
        return [point for key, point in self._points.items() if key not in begun]

    @property
    def ended(self) -> bool:
        """Return whether every point was begun, and none waits to be begun again."""
        return not self._trials.all(TrialState.WAITING) and not self._missing()

    def start_next(self) -> optuna.Trial | None:
        """Start the next point, first one that is begun again; None if there is none."""
        study = self._trials.study
        if not self._trials.all(TrialState.WAITING):
            point = next(iter(self._missing()), None)
            if point is None:
                return None
            role = self._start_role if point is next(iter(self._points.values())) else "search"
            study.enqueue_trial(dict(point), user_attrs={"role": role})
        return study.ask()
