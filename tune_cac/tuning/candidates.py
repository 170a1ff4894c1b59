"""Selection of settings to train: those that fit the model and change the baseline's training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from analysis.formatting import plural
from trainables.compression.schedule import ModelFacts, read_schedule, resolve
from trainables.compression.scheduler import facts_of_run
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.errors import UserError
from tune_cac.tuning.draft_study import draft_of
from tune_cac.tuning.optuna_objectives import tell_complete
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.trained_settings import TrainedSettings
from tune_cac.tuning.warm_start.baseline import WarmStart

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
    """Why settings so far could not be."""
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
