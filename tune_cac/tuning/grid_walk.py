"""The trials of a grid search: its points in their order, each once, whatever interrupted the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from search_spaces.grid import GridPoints
from tune_cac.tuning.study_trials import StudyTrials, as_key, queued_parameters

#: Note on a trial of a point that another one has.
_TWICE = "another trial of the same point"


@dataclass(frozen=True)
class GridWalk:
    """Start the points that the study lacks.

    Optuna's BruteForceSampler is no help: a trial without parameters, as the baseline is, makes it raise, it ends only
    a study that optimizes in one process, and its order is random.
    """

    trials: StudyTrials
    """Trials of the study."""
    points: GridPoints
    """Points to train."""
    start_role: str
    """Role of the space's starting point."""
    _keys: list[str] = field(default_factory=list)

    def missing(self) -> list[Mapping[str, Any]]:
        """Return the parameters of the points that were not begun."""
        trials = self.trials.all()
        begun = {key for key, trial in zip(self._keys_of(trials), trials, strict=True) if _is_point(trial)}
        return [point for key, point in self._by_key if key not in begun]

    @cached_property
    def _by_key(self) -> list[tuple[str, Mapping[str, Any]]]:
        return [(as_key(point), point) for point in self.points]

    @property
    def ended(self) -> bool:
        """Return whether every point was begun, and none waits to be begun again."""
        return not self._waiting() and not self.missing()

    def start_next(self) -> optuna.Trial | None:
        """Start the next point, first one that is begun again; None if there is none."""
        study = self.trials.study
        while True:
            if not self._waiting():
                missing = self.missing()
                if not missing:
                    return None
                is_start = missing[0] is self.points[0]
                study.enqueue_trial(dict(missing[0]), user_attrs={"role": self.start_role if is_start else "search"})
            trial = study.ask()
            if not self._is_begun(trial.number):
                return trial
            trial.set_user_attr("continued_by", _TWICE)
            study.tell(trial, state=TrialState.FAIL)

    def _is_begun(self, number: int) -> bool:
        """Return whether another trial has this one's parameters: a search killed twice may queue a point twice."""
        trials = self.trials.all()
        keys = self._keys_of(trials)
        same = (trials[n] for n, key in enumerate(keys) if key == keys[number] and n != number)
        return any(_is_point(trial) and trial.state != TrialState.WAITING for trial in same)

    def _keys_of(self, trials: list[FrozenTrial]) -> list[str]:
        """Return the points of all trials as text; a trial has its point from its creation on."""
        self._keys.extend(as_key(queued_parameters(trial)) for trial in trials[len(self._keys) :])
        return self._keys

    def _waiting(self) -> list[FrozenTrial]:
        return self.trials.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))


def _is_point(trial: FrozenTrial) -> bool:
    return trial.user_attrs.get("role") not in ("baseline", "control") and "continued_by" not in trial.user_attrs
