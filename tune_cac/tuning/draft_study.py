"""A study in memory in which a sampler draws settings before the study itself begins them.

It follows the study trial by trial, so that a suggestion costs no copy of all trials. It knows what a sampler reads:
parameters, results and constraints, and no user attributes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from analysis.metrics.pareto import non_dominated
from tune_cac.tuning.optuna_private import live_trial
from tune_cac.tuning.study_trials import StudyTrials

#: Ended trials that a limited draft keeps when it forgets: the best, of which Optuna's TPE models 25 as good ones, and
#: a random sample of the others, for the density of the rest; the newest alone would lie where the best ones do.
KEPT_BEST, KEPT_OTHERS = 50, 100
#: Running trials that it keeps, the newest, which lie where the sampler draws now.
KEPT_RUNNING = 50
#: Trials from which a limited draft forgets.
MOST_TRIALS = 250
#: Stands for the number of a running trial that was forgotten.
_FORGOTTEN = -1


class DraftStudy:
    """Follow a study in memory.

    Args:
        trials: of the study.
        sampler: of the drafts.
        limited: whether trials are forgotten beyond `MOST_TRIALS`: TPE takes longer with every trial it knows.
        with_parameters: whether trials without parameters are left out.
    """

    def __init__(
        self, trials: StudyTrials, sampler: BaseSampler, *, limited: bool = False, with_parameters: bool = False
    ) -> None:
        self._trials, self._limited, self._with_parameters = trials, limited, with_parameters
        self.study = optuna.create_study(directions=trials.study.directions, sampler=sampler)
        """The draft."""
        self._open: dict[int, int | None] = {}  # numbers of unfinished trials, and what they have here; None for none
        self._seen = 0  # trials of the study that were looked at
        self._draw = random.Random(0)
        self._keys: dict[int, float] = {}  # random numbers of ended drafts: those with the lowest are the sample

    def follow(self) -> None:
        """Add the trials that the study has begun, and report those that have ended, since the last call."""
        known = self._trials.all()
        for number in dict.fromkeys((*self._open, *range(self._seen, len(known)))):
            if self._open.get(number) is None or known[number].state != TrialState.RUNNING:
                self._follow_one(known[number])
        self._seen = len(known)
        if self._limited and len(self.study.get_trials(deepcopy=False)) > MOST_TRIALS:
            self._forget()

    def begin(self, drawn: int, number: int) -> None:
        """Note that the study has begun a draft.

        Args:
            drawn: its number here.
            number: its number in the study, of which it is the newest trial.
        """
        self._open[number] = drawn
        self._seen += number == self._seen  # else another search has added a trial, which is followed later

    def _follow_one(self, trial: FrozenTrial) -> None:
        here = self._open.get(trial.number)
        ended = trial.state.is_finished()
        if here is not None and here != _FORGOTTEN:
            self._report(here, trial)
        elif ended or (trial.state == TrialState.RUNNING and trial.params):
            here = self._add(trial)
        if ended:
            self._open.pop(trial.number, None)
        else:
            self._open[trial.number] = here

    def _add(self, trial: FrozenTrial) -> int | None:
        """Return the number of a trial that was added; None for one that the sampler must not see."""
        if self._with_parameters and not trial.params:
            return None
        with suppress(ValueError):  # a starting point may lie outside the ranges; Optuna rejects it here
            self.study.add_trial(_copy(trial))
            return len(self.study.get_trials(deepcopy=False)) - 1
        return None

    def _report(self, here: int, trial: FrozenTrial) -> None:
        live = live_trial(self.study, self.study.get_trials(deepcopy=False)[here])
        for name, value in trial.constraints.items():
            live.set_constraint(name, value)
        self.study.tell(here, trial.values if trial.state == TrialState.COMPLETE else None, state=trial.state)

    def _forget(self) -> None:
        """Keep the best ended trials, a uniform sample of all that ended so far, and the newest that run.

        Running ones that are forgotten are added when they end. Every trial has one random number for good, so what was
        forgotten before would not be in a later sample either (reservoir sampling).
        """
        there = self.study.get_trials(deepcopy=False)
        running = sorted(here for here in self._open.values() if here not in (None, _FORGOTTEN))[-KEPT_RUNNING:]
        complete = [trial for trial in there if trial.state == TrialState.COMPLETE]
        keys = {trial.number: self._keys.get(trial.number) or self._draw.random() for trial in complete}
        kept = set(sorted(keys, key=keys.__getitem__)[:KEPT_OTHERS]) | {*running}
        kept |= {complete[place].number for place in best_places(complete, self.study.directions, KEPT_BEST)}
        numbers: dict[int, int] = {}
        fresh = optuna.create_study(directions=self.study.directions, sampler=self.study.sampler)
        for trial in there:
            if trial.number in kept:
                numbers[trial.number] = len(numbers)
                fresh.add_trial(_copy(trial))
        self.study = fresh
        self._keys = {numbers[number]: key for number, key in keys.items() if number in numbers}
        self._open = {
            number: None if here is None else numbers.get(here, _FORGOTTEN) for number, here in self._open.items()
        }


def _copy(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy without what no sampler reads; values between two steps of a range are on the nearer one."""
    return create_trial(
        state=trial.state,
        values=trial.values if trial.state == TrialState.COMPLETE else None,
        params={name: _on_grid(value, trial.distributions[name]) for name, value in trial.params.items()},
        distributions=trial.distributions,
        system_attrs=trial.system_attrs,
    )


def _on_grid(value: Any, asked: BaseDistribution) -> Any:
    if not isinstance(asked, (FloatDistribution, IntDistribution)) or not asked.step or asked.log:
        return value
    if not asked.low <= value <= asked.high:
        return value  # of a starting point outside the range, which Optuna rejects
    steps = round((value - asked.low) / asked.step)
    near = min(asked.low + steps * asked.step, asked.high)
    return int(near) if isinstance(asked, IntDistribution) else float(near)


def best_places(
    trials: Sequence[FrozenTrial], directions: Sequence[optuna.study.StudyDirection], count: int
) -> list[int]:
    """Return the places of the best trials: feasible ones front by front, then those that violate constraints least."""
    signs = np.array([1.0 if direction == optuna.study.StudyDirection.MAXIMIZE else -1.0 for direction in directions])
    violated = [sum(max(0.0, value) for value in trial.constraints.values()) for trial in trials]
    left = np.array([place for place, violation in enumerate(violated) if violation == 0], dtype=int)
    values = np.array([trial.values for trial in trials]).reshape(len(trials), len(signs)) * signs
    found: list[int] = []
    while len(left) and len(found) < count:
        front = non_dominated(values[left])
        found += left[front].tolist()
        left = left[~front]
    infeasible = sorted((place for place, violation in enumerate(violated) if violation > 0), key=violated.__getitem__)
    return [*found, *infeasible][:count]
