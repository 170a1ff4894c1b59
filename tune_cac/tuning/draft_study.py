"""A copy of a study in memory, in which a sampler draws settings before the study itself begins them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from tune_cac.tuning.study_trials import StudyTrials


def draft_of(
    trials: StudyTrials,
    sampler: optuna.samplers.BaseSampler,
    further: Iterable[FrozenTrial] = (),
    *,
    with_parameters: bool = False,
) -> optuna.Study:
    """Return a study in memory with the trials that were begun, as far as samplers read them.

    Args:
        trials: of the study.
        sampler: of the copy.
        further: trials that the copy has besides.
        with_parameters: whether trials without parameters are left out.
    """
    draft = optuna.create_study(directions=trials.study.directions, sampler=sampler)
    for trial in (*trials.all(), *further):
        begun = trial.state.is_finished() or (trial.state == TrialState.RUNNING and trial.params)
        if begun and (trial.params or not with_parameters):
            with suppress(ValueError):  # a starting point may lie outside the ranges; Optuna rejects it here
                draft.add_trial(_copy(trial))
    return draft


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
