"""Baselines of combinations of options: who trains when, what a trial is told against, and what cannot be judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from searchers import CONTEXT, row, told

import search_spaces
from trainables.config import TrialConfig
from tune_cac.tuning.search_plan import SearchPlan
from tune_cac.tuning.study_searcher import FINISHED, StudySearch

FILE = "CAC_VAR_START_THR: {low: 0.9, high: 0.99}\nlr: {choices: [0.1, 0.5]}"
FIRST = ["lr=0.1", "width=8"]


def searching(folder: Path, begin: bool = True) -> StudySearch:
    """A searcher over a threshold and a learning rate; a width is the same in all trials."""
    made = StudySearch(SearchPlan(
        space=search_spaces.load("my.yaml", {"my.yaml": FILE}),
        context=search_spaces.SpaceContext(total_steps=CONTEXT.total_steps, workload_options=("width=8",)),
        base=TrialConfig(workload="a.b:c", workload_options=tuple(FIRST), method="none"),
        journal=folder / "optuna.journal", allowed_drop=0.01, seed=0, run_folder="ray/run-000", checkpoint_every_s=60,
        tree=folder / "tree", budget_bytes=0, trials=1, sharing=False,
    ))  # fmt: skip
    if begin:
        made.begin()
    return made


def asked(search: StudySearch, name: str) -> dict[str, Any]:
    found = search.suggest(name)
    assert isinstance(found, dict)
    return found


def ask_until(search: StudySearch, options: str) -> dict[str, Any]:
    """Ask until a trial of the combination comes; all others end well."""
    for number in range(60):
        found = asked(search, f"{options}-{number}")
        if found["options"] == options and found["role"] != "baseline":
            return found
        search.on_trial_complete(f"{options}-{number}", row(0.9, 0.1))
    raise AssertionError(options)


def test_each_combination_is_judged_against_its_own_baseline(tmp_path: Path) -> None:
    search = searching(tmp_path)
    first = asked(search, "0")
    assert (first["config"]["workload_options"], first["config"]["method"]) == (FIRST, "none")
    search.on_trial_complete("0", row(0.9, 0.0))
    start = asked(search, "1")  # the starting point, in the combination of the first baseline
    assert (start["options"], start["config"]["workload_options"]) == ("lr=0.1", FIRST)
    search.on_trial_complete("1", row(0.88, 0.3))
    trial = ask_until(search, "lr=0.5")
    before = len(told(tmp_path))
    baseline = asked(search, "b")
    assert (baseline["role"], baseline["options"], baseline["trial"]) == ("baseline", "lr=0.5", before)
    assert baseline["config"] == {**first["config"], "workload_options": ["lr=0.5", "width=8"]}
    assert baseline["sharing"] is not None  # it is recorded
    again = asked(search, "another")  # no second one while it trains
    assert again["role"] == "search"
    number = str(next(name for name, t in search._running.items() if t.number == trial["trial"]))
    search.on_trial_complete(number, row(0.7, 0.2))
    assert told(tmp_path)[trial["trial"]].state == TrialState.RUNNING  # waits for its baseline
    search.on_trial_complete("b", row(0.75, 0.0))
    trials = told(tmp_path)
    assert trials[trial["trial"]].constraints["accuracy_drop"] == pytest.approx(0.75 - 0.7 - 0.01)
    assert trials[1].constraints["accuracy_drop"] == pytest.approx(0.9 - 0.88 - 0.01)
    assert trials[baseline["trial"]].values == [0.75, 0.0]
    assert {t.user_attrs["options"] for t in trials if "config" in t.user_attrs} == {"lr=0.1", "lr=0.5"}
    counted = [t for t in trials if t.state == TrialState.COMPLETE and t.number != baseline["trial"]]
    assert search.trials.finished_count() == len(counted)


def test_an_interrupted_baseline_is_trained_when_the_search_goes_on(tmp_path: Path) -> None:
    search = searching(tmp_path)
    asked(search, "0")
    search.on_trial_complete("0", row(0.9, 0.0))
    trial = ask_until(search, "lr=0.5")
    baseline = asked(search, "b")
    number = str(next(name for name, t in search._running.items() if t.number == trial["trial"]))
    search.on_trial_complete(number, row(0.7, 0.2))
    again = searching(tmp_path, begin=False)  # the process was killed; the trial had ended, its baseline had not
    again.adopt_unfinished()
    again.ask_for(0)
    [missing] = again.baselines.missing()
    assert missing.values == {"method": "none", "workload_options": ["lr=0.5", "width=8"]}
    repeated = asked(again, "b")
    assert repeated["config"] == baseline["config"]
    assert again.suggest("x") == FINISHED or again.suggest("x") is None
    again.on_trial_complete("b", row(0.75, 0.0))
    assert again.baselines.missing() == []
    assert told(tmp_path)[trial["trial"]].constraints["accuracy_drop"] == pytest.approx(0.04)


def test_a_combination_whose_baseline_failed_is_not_trained_again(tmp_path: Path) -> None:
    search = searching(tmp_path)
    asked(search, "0")
    search.on_trial_complete("0", row(0.9, 0.0))
    trial = ask_until(search, "lr=0.5")
    baseline = asked(search, "b")
    search.tell_failure("b", "TrainingDiverged: the loss is nan")
    number = str(next(name for name, t in search._running.items() if t.number == trial["trial"]))
    search.on_trial_complete(number, row(0.7, 0.2))
    assert told(tmp_path)[trial["trial"]].constraints == {"no_baseline": 1.0}
    assert not search.gave_up
    for name in range(20):
        found = asked(search, f"later-{name}")
        assert found["options"] == "lr=0.1"
        search.on_trial_complete(f"later-{name}", row(0.89, 0.2))
    pruned = [t for t in told(tmp_path) if t.state == TrialState.PRUNED]
    assert pruned
    assert {t.user_attrs["error"] for t in pruned} == {
        "the baseline of lr=0.5 failed (TrainingDiverged: the loss is nan)"
    }
    assert told(tmp_path)[baseline["trial"]].state == TrialState.FAIL
