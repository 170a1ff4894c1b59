"""The study in memory in which settings are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from searchers import searcher

from tune_cac.tuning import study_searcher
from tune_cac.tuning.draft_study import draft_of
from tune_cac.tuning.study_searcher import make_sampler
from tune_cac.tuning.study_trials import StudyTrials, open_study

RANGES = {name: optuna.distributions.FloatDistribution(0, 1) for name in "xy"}


def shown(trial: FrozenTrial) -> tuple[Any, ...]:
    return trial.state, trial.params, trial.values, trial.constraints


def test_a_draft_has_what_samplers_read_of_begun_trials(tmp_path: Path) -> None:
    trials = StudyTrials(open_study(tmp_path / "optuna.journal", make_sampler(0)))
    study = trials.study
    study.enqueue_trial({"x": 0.5})  # what waits has no parameters yet
    running = [trials.start({"row": 1}, params={"x": n / 4, "y": 0.5}, distributions=RANGES) for n in range(4)]
    running[0].set_constraint("drop", -0.1)
    study.tell(running[0], [0.9, 0.3])
    study.tell(running[1], state=TrialState.FAIL)
    study.tell(running[2], state=TrialState.PRUNED)
    trials.start({})
    draft = draft_of(trials, make_sampler(0))
    assert [*map(shown, draft.trials)] == [*map(shown, study.trials[1:5])]
    assert not any(trial.user_attrs for trial in draft.trials)
    more = optuna.trial.create_trial(params={"x": 0.1, "y": 0.2}, distributions=RANGES, values=[0.5, 0.5])
    assert len(draft_of(trials, make_sampler(0), [more]).trials) == 5


def test_fewer_are_skipped_where_nothing_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = searcher(tmp_path)
    made.suggest("start")
    baseline = made.trials.baseline_row()
    drawn = []
    monkeypatch.setattr(study_searcher, "tell_complete", lambda *arguments: drawn.append(arguments))
    monkeypatch.setattr(made.candidates, "changes_nothing", lambda config: True)
    found = []
    for _ in range(8):
        made.candidates.start_next(baseline, knows=True)
        found.append(len(drawn))
        drawn.clear()
    assert found == [50, 25, 12, 6, 3, 1, 1, 1]
    monkeypatch.setattr(made.candidates, "changes_nothing", lambda config: False)
    made.candidates.start_next(baseline, knows=True)
    monkeypatch.setattr(made.candidates, "changes_nothing", lambda config: True)
    made.candidates.start_next(baseline, knows=True)
    assert len(drawn) == 50
