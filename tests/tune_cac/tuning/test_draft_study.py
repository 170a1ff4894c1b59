"""The study in memory in which settings are drawn, and what a suggestion costs in a study of many trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from searchers import row, searcher

from tune_cac.tuning import candidates
from tune_cac.tuning.draft_study import KEPT_BEST, KEPT_OTHERS, KEPT_RUNNING, MOST_TRIALS, DraftStudy, best_places
from tune_cac.tuning.samplers import make_sampler
from tune_cac.tuning.study_trials import StudyTrials, open_study

RANGES = {name: optuna.distributions.FloatDistribution(0, 1) for name in "xy"}


def study_of(count: int, *, ended: bool = True) -> StudyTrials:
    """A study in memory; every third trial violates its constraint."""
    study, draw = optuna.create_study(directions=["maximize"] * 2), Random(0)
    for number in range(count):
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE if ended else TrialState.RUNNING,
            params={name: draw.random() for name in RANGES},
            distributions=RANGES,
            values=[draw.random(), draw.random()] if ended else None,
            constraints={"drop": draw.random() * (number % 3 == 0)} if ended else None,
            user_attrs={"row": {"much": "that no sampler reads"}},
        )
        study.add_trial(trial)
    return StudyTrials(study)


def shown(trial: FrozenTrial) -> tuple[Any, ...]:
    return trial.state, trial.params, trial.values, trial.constraints


def test_a_draft_follows_its_study_through_every_state(tmp_path: Path) -> None:
    trials = StudyTrials(open_study(tmp_path / "optuna.journal", make_sampler(0)))
    study, draft = trials.study, DraftStudy(trials, make_sampler(0))
    study.enqueue_trial({"x": 0.5})
    running = [trials.start({}, params={"x": n / 4, "y": 0.5}, distributions=RANGES) for n in range(3)]
    draft.follow()
    assert [t.params["x"] for t in draft.study.trials] == [0.0, 0.25, 0.5]  # what waits has no parameters yet
    running[0].set_constraint("drop", -0.1)
    study.tell(running[0], [0.9, 0.3])
    study.tell(running[1], state=TrialState.FAIL)
    study.tell(running[2], state=TrialState.PRUNED)
    queued = study.ask()
    queued.suggest_float("x", 0, 1)
    drawn = draft.study.ask()
    drawn.suggest_float("x", 0, 1)
    begun = trials.start({}, params=drawn.params, distributions=drawn.distributions)
    draft.begin(drawn.number, begun.number)
    study.tell(begun, [0.8, 0.1])
    study.tell(queued, [0.7, 0.2])
    draft.follow()
    assert sorted(map(str, map(shown, draft.study.trials))) == sorted(map(str, map(shown, study.trials)))
    assert len(draft.study.trials) == len(study.trials) == 5
    assert not any(trial.user_attrs for trial in draft.study.trials)


def test_the_best_places_are_those_that_few_dominate() -> None:
    trials = study_of(60).all()
    feasible = [n for n, trial in enumerate(trials) if all(value <= 0 for value in trial.constraints.values())]

    def dominates(a: int, b: int) -> bool:
        pairs = list(zip(trials[a].values or (), trials[b].values or (), strict=True))
        return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)

    left, fronts = set(feasible), []
    while left:
        front = {n for n in left if not any(dominates(other, n) for other in left)}
        fronts.append(front)
        left -= front
    found = best_places(trials, [optuna.study.StudyDirection.MAXIMIZE] * 2, 60)
    for front in fronts:
        assert set(found[: len(front)]) == front
        found = found[len(front) :]
    violated = [trials[n].constraints["drop"] for n in found]
    assert violated == sorted(violated)
    assert len(violated) == 60 - len(feasible)


def test_a_limited_draft_forgets_but_keeps_the_best_a_sample_and_what_runs() -> None:
    trials = study_of(MOST_TRIALS)
    ended = trials.all()
    draft = DraftStudy(trials, make_sampler(0), limited=True)
    draft.follow()
    assert len(draft.study.trials) == MOST_TRIALS
    running = trials.start({}, params={"x": 0.125, "y": 0.5}, distributions=RANGES)
    last = trials.start({}, params={"x": 0.375, "y": 0.5}, distributions=RANGES)
    trials.study.tell(last, [0.999, 0.999])  # among the best
    draft.follow()
    there = [trial.params["x"] for trial in draft.study.trials]
    assert KEPT_OTHERS < len(there) <= KEPT_BEST + KEPT_OTHERS + 1
    assert {0.125, 0.375} < set(there)
    best = [ended[n].params["x"] for n in best_places(ended, trials.study.directions, KEPT_BEST - 1)]
    assert set(best) < set(there)
    assert there.index(0.125) == len(there) - 2  # in the study's order
    trials.study.tell(running, [0.6, 0.4])
    draft.follow()
    assert [t.values for t in draft.study.trials if t.params["x"] == 0.125] == [[0.6, 0.4]]


def test_of_many_running_trials_a_limited_draft_knows_the_newest_and_all_that_end() -> None:
    trials = study_of(10)
    draft = DraftStudy(trials, make_sampler(0), limited=True)
    running = [trials.start({}, params={"x": n / 1000, "y": 0.5}, distributions=RANGES) for n in range(MOST_TRIALS)]
    draft.follow()
    there = [t.params["x"] for t in draft.study.trials if t.state == TrialState.RUNNING]
    assert there == [n / 1000 for n in range(MOST_TRIALS)][-KEPT_RUNNING:]
    trials.study.tell(running[0], [0.6, 0.4])  # forgotten while it ran
    trials.study.tell(running[-1], [0.7, 0.3])
    draft.follow()
    assert [t.values for t in draft.study.trials if t.params["x"] == 0] == [[0.6, 0.4]]
    assert [t.values for t in draft.study.trials if t.params["x"] == there[-1]] == [[0.7, 0.3]]
    assert len(draft.study.trials) == 10 + KEPT_RUNNING + 1


def test_a_trial_that_another_search_adds_beside_a_draft_is_followed() -> None:
    trials = study_of(3)
    draft = DraftStudy(trials, make_sampler(0))
    draft.follow()
    drawn = draft.study.ask()
    drawn.suggest_float("x", 0, 1)
    trials.study.add_trial(study_of(1).all()[0])
    begun = trials.start({}, params=drawn.params, distributions=drawn.distributions)
    draft.begin(drawn.number, begun.number)
    trials.study.tell(begun, [0.5, 0.5])
    draft.follow()
    assert len(draft.study.trials) == len(trials.all()) == 5


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count how often a trial's attributes are read, and how often a trial is added to a study."""
    calls = [0]
    attrs, add = FrozenTrial.user_attrs, optuna.Study.add_trial

    def counting(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[0] += 1
            return real(*arguments)

        return call

    read = counting(attrs.__get__)
    monkeypatch.setattr(FrozenTrial, "user_attrs", property(read, attrs.__set__))
    monkeypatch.setattr(optuna.Study, "add_trial", counting(add))

    def taken() -> int:
        found, calls[0] = calls[0], 0
        return found

    return taken


@pytest.mark.parametrize("sampler", ["auto", "random"])
def test_what_a_trial_costs_does_not_grow_with_the_trials_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    made = searcher(tmp_path, sampler=sampler)
    draw, taken, costs = Random(0), counted(monkeypatch), []
    for number in range(60):
        made.suggest(str(number))
        made.on_trial_complete(str(number), row(draw.random(), draw.random()))
        costs.append(taken())
    assert min(costs[5:]) > 0
    assert max(costs[50:]) == max(costs[5:15])
    assert not made._running  # nothing is kept of what has ended
    assert not made._rows_so_far


def test_fewer_are_skipped_where_nothing_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = searcher(tmp_path)
    made.suggest("start")
    baseline = made.trials.baseline_row()
    drawn = []
    monkeypatch.setattr(candidates, "tell_complete", lambda *arguments: drawn.append(arguments))
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
